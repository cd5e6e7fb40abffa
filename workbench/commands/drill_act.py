"""`workbench drill act`: what a learner does to the drill's engine, as an operator would."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.options import StateOption

app = typer.Typer(help="Change the drill's engine, as an operator would.", no_args_is_help=True)

LayerOption = Annotated[int | None, typer.Option(help="MoE layer; without it, every layer.")]


@app.command()
def smooth(
    bonus: Annotated[float, typer.Option(help="In logits; 0 switches it off.")],
    state: StateOption = None,
) -> None:
    """Give the experts of a sequence's previous token a bonus."""
    _act(state, "smooth", bonus=bonus)


@app.command()
def bias(
    expert: Annotated[int, typer.Option()],
    value: Annotated[float, typer.Option(help="Added to the expert's logit.")],
    layer: LayerOption = None,
    state: StateOption = None,
) -> None:
    """Add a value to an expert's logit."""
    _act(state, "bias", expert=expert, value=value, layer=layer)


@app.command()
def ban(
    expert: Annotated[int, typer.Option()], layer: LayerOption = None, state: StateOption = None
) -> None:
    """Never choose an expert."""
    _act(state, "ban", expert=expert, layer=layer)


@app.command()
def force(
    experts: Annotated[list[int], typer.Argument(help="Experts always chosen.")],
    layer: LayerOption = None,
    state: StateOption = None,
) -> None:
    """Always choose these experts."""
    _act(state, "force", experts=experts, layer=layer)


@app.command("clear-policy")
def clear_policy(state: StateOption = None) -> None:
    """Forget bans, forced experts, biases and smoothing."""
    _act(state, "clear-policy")


@app.command()
def publish(state: StateOption = None) -> None:
    """Publish a whole new table: experts in order, one copy each."""
    _act(state, "publish")


@app.command()
def rebalance(
    spare: Annotated[int, typer.Option(help="Room for copies on each device.")] = 1,
    state: StateOption = None,
) -> None:
    """Publish a table planned for the load since the last change."""
    _act(state, "rebalance", spare=spare)


@app.command()
def replicate(
    layer: Annotated[int, typer.Option()],
    expert: Annotated[int, typer.Option()],
    spare: Annotated[int, typer.Option(help="Room for copies on each device.")] = 1,
    state: StateOption = None,
) -> None:
    """Publish a table with a copy of one expert on every device."""
    _act(state, "replicate", layer=layer, expert=expert, spare=spare)


@app.command()
def move(
    layer: Annotated[int, typer.Option()],
    expert: Annotated[int, typer.Option()],
    device: Annotated[int, typer.Option(help="Where it goes.")],
    state: StateOption = None,
) -> None:
    """Publish a table in which an expert has moved to another device."""
    _act(state, "move", layer=layer, expert=expert, device=device)


@app.command("replicate-busiest")
def replicate_busiest(
    spare: Annotated[int, typer.Option(help="Room for copies on each device.")] = 1,
    state: StateOption = None,
) -> None:
    """Publish a table with a copy, on every device, of the expert that most tokens chose."""
    _act(state, "replicate-busiest", spare=spare)


@app.command("move-busiest")
def move_busiest(state: StateOption = None) -> None:
    """Publish a table in which the expert that most tokens chose has gone to the next device."""
    _act(state, "move-busiest")


@app.command()
def restart(
    instance: Annotated[int, typer.Option(help="Which one; 0 is the first.")] = 0,
    state: StateOption = None,
) -> None:
    """Start the engine again with the options it has."""
    _act(state, "restart", instance=instance)


@app.command()
def configure(
    option: Annotated[str, typer.Argument(help="An option of the engine.")],
    value: Annotated[str, typer.Argument()],
    instance: Annotated[int, typer.Option(help="Which one; 0 is the first.")] = 0,
    state: StateOption = None,
) -> None:
    """Start the engine again with one option changed."""
    _act(state, "configure", option=option, value=value, instance=instance)


@app.command()
def exchange(mode: Annotated[str, typer.Argument()], state: StateOption = None) -> None:
    """Exchange rows between ranks by another mode from the next step on."""
    _act(state, "exchange", mode=mode)


@app.command()
def drain(rank: Annotated[int, typer.Argument()], state: StateOption = None) -> None:
    """Move everything off a rank and end its process."""
    _act(state, "drain", rank=rank)


@app.command("add-rank")
def add_rank(rank: Annotated[int, typer.Argument()], state: StateOption = None) -> None:
    """Start a rank that is missing, and let it take part again."""
    _act(state, "add-rank", rank=rank)


@app.command()
def fetch(
    file: Annotated[str, typer.Argument(help="A file of the model, or all.")] = "all",
    state: StateOption = None,
) -> None:
    """Copy a file of the model from where it was published; restart to read it."""
    _act(state, "fetch", file=file)


@app.command("trust-files")
def trust_files(state: StateOption = None) -> None:
    """Write the manifest anew for the files as they are; restart to read them."""
    _act(state, "trust-files")


@app.command("set-model")
def set_model(
    key: Annotated[str, typer.Argument(help="An entry of config.json.")],
    value: Annotated[int, typer.Argument()],
    state: StateOption = None,
) -> None:
    """Change a number in the model's config.json; restart to read it."""
    _act(state, "set-model", key=key, value=value)


@app.command("rename-tensor")
def rename_tensor(
    old: Annotated[str, typer.Argument()],
    new: Annotated[str, typer.Argument()],
    state: StateOption = None,
) -> None:
    """Give a tensor of the weights another name; restart to read it."""
    _act(state, "rename-tensor", old=old, new=new)


@app.command()
def refuse(label: Annotated[str, typer.Argument()], state: StateOption = None) -> None:
    """Let the gateway refuse requests of a label, until the drill ends."""
    _act(state, "refuse", label=label)


@app.command()
def capacity(
    factor: Annotated[float, typer.Argument(help="Times the even share; 0 drops nothing.")],
    state: StateOption = None,
) -> None:
    """Limit the rows of each expert to a multiple of its even share."""
    _act(state, "capacity", factor=factor)


@app.command("tune-router")
def tune_router(
    steps: Annotated[int, typer.Option(help="Steps of training.")] = 30,
    state: StateOption = None,
) -> None:
    """Train the gates alone, with a larger weight on balance; restart to read them."""
    _act(state, "tune-router", steps=steps)


@app.command("ready-by")
def ready_by(
    way: Annotated[str, typer.Argument(help="completion or process.")], state: StateOption = None
) -> None:
    """Let the gateway tell by a completion, or by the process, whether an instance is ready."""
    _act(state, "ready-by", way=way)


@app.command("add-missing")
def add_missing(state: StateOption = None) -> None:
    """Start every rank that is missing."""
    _act(state, "add-missing")


@app.command("replace-slowest")
def replace_slowest(state: StateOption = None) -> None:
    """Drain the rank that the others wait for, and start it again in a fresh process."""
    _act(state, "replace-slowest")


@app.command("start-job")
def start_job(name: Annotated[str, typer.Argument()], state: StateOption = None) -> None:
    """Start a job that belongs beside the engine."""
    _act(state, "start-job", name=name)


@app.command("stop-job")
def stop_job(name: Annotated[str, typer.Argument()], state: StateOption = None) -> None:
    """End a job that runs beside the engine."""
    _act(state, "stop-job", name=name)


def _act(state: Path | None, act: str, **arguments: Any) -> None:
    from workbench.drills.client import joined

    with joined(state) as drill:
        print(drill.act(act, **arguments)["said"])
