"""What a learner can do to a deployment: options, restarts, ranks, files, jobs."""

from __future__ import annotations

import json
import shutil
from typing import Any

import numpy as np

from engine.errors import ConfigError, RoutingError, nearest
from workbench.drills.deployment import FIXED, READY_BY
from workbench.drills.hands import Hands, act, act_where
from workbench.drills.weights_file import WEIGHTS, rename
from workbench.trace.trace import Trace

WITHOUT_EFFECT = {
    "gradient_checkpointing": "it saves the activations that a backward pass would need; an engine "
    "that only infers keeps none, so nothing changes",
    "dropout": "it is a part of training; an engine that only infers has none, so nothing changes",
}
"""Options that people ask for and that change nothing in an engine that only infers."""


@act
def restart(hands: Hands, trace: Trace, instance: int = 0) -> str:
    """Start the engine again with the options it has; instance 0 is the first."""
    _check_instance(hands, instance)
    return hands.deployment.restart(instance)


@act
def configure(hands: Hands, trace: Trace, option: str, value: str, instance: int = 0) -> str:
    """Start the engine again with one option changed."""
    _check_instance(hands, instance)
    if option in WITHOUT_EFFECT:
        said = hands.deployment.restart(instance)
        return f"{option} = {value}: {WITHOUT_EFFECT[option]}; {said}"
    if option in FIXED:
        raise ConfigError(f"option ({option}) stays as it is in a drill.")
    said = hands.deployment.restart(instance, **{option: _value(value)})
    return f"{option} = {value}; {said}"


@act_where("ranks")
def exchange(hands: Hands, trace: Trace, mode: str) -> str:
    """Exchange rows between ranks by another mode from the next step on."""
    hands.control.set_exchange(mode)
    return f"ranks exchange rows by {mode}"


@act_where("ranks")
def drain(hands: Hands, trace: Trace, rank: int) -> str:
    """Move everything off a rank and end its process."""
    hands.control.drain(rank)
    return f"rank {rank} is drained: its experts and requests go elsewhere, its process ends"


@act_where("ranks")
def add_rank(hands: Hands, trace: Trace, rank: int) -> str:
    """Start a rank that is missing, and let it take part again."""
    hands.control.add_rank(rank)
    return f"rank {rank} is started and joins the others"


@act_where("ranks")
def add_missing(hands: Hands, trace: Trace) -> str:
    """Start every rank that is missing."""
    missing = hands.deployment.missing_ranks
    for rank in missing:
        hands.control.add_rank(rank)
    return f"started: {', '.join(f'rank {rank}' for rank in missing) or 'none was missing'}"


@act_where("ranks")
def replace_slowest(hands: Hands, trace: Trace) -> str:
    """Drain the rank that the others wait for, and start it again in a fresh process."""
    columns = trace.columns
    busy = {
        rank: float(np.median(columns["ranks/busy_ms"][columns["ranks/rank"] == rank]))
        for rank in sorted(set(columns["ranks/rank"].tolist()))
    }
    if not busy:
        raise ConfigError("no step has run on the ranks since the last change; try again.")
    slowest = max(busy, key=lambda rank: busy[rank])
    hands.control.drain(slowest)
    hands.control.add_rank(slowest)
    return f"rank {slowest}, which computed for {busy[slowest]:.0f} ms a step, is replaced"


@act
def run(hands: Hands, trace: Trace, rows: int) -> str:
    """Wait until so many rows have run."""
    hands.run(rows)
    return f"waited for {rows} rows"


@act_where("files")
def fetch(hands: Hands, trace: Trace, file: str = "all") -> str:
    """Copy a file of the model from where it was published; the engine reads it when it starts."""
    from engine.checkpoint.manifest import NAME

    deployment = hands.deployment
    if not deployment.has_files:
        raise ConfigError("this engine runs from the published folder itself.")
    names = sorted(path.name for path in deployment.published.iterdir() if path.is_file())
    if file != "all" and file not in names:
        raise ConfigError(
            f"file ({file}) is not published{nearest(file, names)} published: {', '.join(names)}."
        )
    for name in names if file == "all" else (file,):
        shutil.copyfile(deployment.published / name, deployment.folder / name)
    if file not in ("all", NAME):
        deployment.note_in_manifest(file)
    return f"fetched {'every file' if file == 'all' else file}; restart to read it"


@act_where("files")
def trust_files(hands: Hands, trace: Trace) -> str:
    """Write the model folder's manifest anew for the files as they are."""
    from engine.checkpoint.manifest import write_manifest

    deployment = hands.deployment
    if not deployment.has_files:
        raise ConfigError("this engine runs from the published folder itself.")
    write_manifest(deployment.folder)
    return "the manifest lists the files as they are; restart to read them"


@act_where("files")
def set_model(hands: Hands, trace: Trace, key: str, value: int) -> str:
    """Change a number in the model's config.json; the engine reads it when it starts."""
    deployment = hands.deployment
    if not deployment.has_files:
        raise ConfigError("this engine runs from the published folder itself.")
    path = deployment.folder / "config.json"
    config: dict[str, Any] = json.loads(path.read_text("utf-8"))
    if key not in config:
        raise ConfigError(f"config.json has no {key!r}{nearest(key, config)}")
    deployment.write_model(key, value)
    return f"config.json says {key} = {value}; restart to read it"


@act_where("files")
def rename_tensor(hands: Hands, trace: Trace, old: str, new: str) -> str:
    """Give a tensor of the weights another name; the engine reads it when it starts."""
    deployment = hands.deployment
    if not deployment.has_files:
        raise ConfigError("this engine runs from the published folder itself.")
    rename(deployment.folder / WEIGHTS, old, new)
    deployment.note_in_manifest(WEIGHTS)
    return f"{old} is called {new}; restart to read it"


@act_where("requests")
def refuse(hands: Hands, trace: Trace, label: str) -> str:
    """Let the gateway refuse requests of a label, until the drill ends."""
    hands.refuse(label)
    return f"requests of {label} are refused at the gateway"


@act
def capacity(hands: Hands, trace: Trace, factor: float) -> str:
    """Limit the rows of each expert to a multiple of its even share; 0 drops nothing."""
    hands.control.set_capacity(factor or None)
    return f"each expert takes {factor:g} times its share" if factor else "no row is dropped"


@act_where("files")
def tune_router(hands: Hands, trace: Trace, steps: int = 30) -> str:
    """Train the gates alone, with a larger weight on balance; restart to read them."""
    from workbench.drills.router_repair import tune

    deployment = hands.deployment
    if not 1 <= steps <= 200:
        raise ConfigError(f"steps ({steps}) must lie between 1 and 200.")
    idle = tune(deployment.folder, steps)
    deployment.note_in_manifest(WEIGHTS)
    return f"the gates were trained for {steps} steps; idlest expert now {idle:.1%}; restart"


@act_where("instances")
def ready_by(hands: Hands, trace: Trace, way: str) -> str:
    """Let the gateway tell by a completion, or by the process, whether an instance is ready."""
    if way not in READY_BY:
        raise ConfigError(f"way ({way}) must be one of {', '.join(READY_BY)}.")
    hands.deployment.ready_by = way
    return f"an instance is ready by its {way}"


@act_where("jobs")
def start_job(hands: Hands, trace: Trace, name: str) -> str:
    """Start a job that belongs beside the engine."""
    job = _job(hands, name)
    if job.running:
        return f"{name} is running already; nothing was done"
    job.start(hands.deployment)
    return f"{name} has started"


@act_where("jobs")
def stop_job(hands: Hands, trace: Trace, name: str) -> str:
    """End a job that runs beside the engine."""
    _job(hands, name).stop()
    return f"{name} has ended"


def _job(hands: Hands, name: str) -> Any:
    jobs = hands.deployment.jobs
    if name not in jobs:
        known = ", ".join(jobs) or "none"
        raise ConfigError(f"there is no job {name!r}{nearest(name, jobs)} jobs: {known}.")
    return jobs[name]


def _check_instance(hands: Hands, instance: int) -> None:
    count = len(hands.deployment.all_options)
    if not 0 <= instance < count:
        raise RoutingError(f"instance ({instance}) must lie between 0 and {count - 1}.")


def _value(text: str) -> Any:
    """Read an option's value as people type it."""
    try:
        return json.loads(text.lower() if text in ("True", "False", "None") else text)
    except ValueError:
        return None if text == "none" else text
