"""`workbench drill`: break a running engine, find out why, repair it, prove it.

`run` keeps the drill's engine alive in one terminal; the other commands speak to it from a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench import paths
from workbench.options import JsonOption, ModelOption
from workbench.output import print_json, say

if TYPE_CHECKING:
    from rich.console import Console

    from workbench.drills import Drill

app = typer.Typer(help="Find and repair faults in a running engine.", no_args_is_help=True)
act_app = typer.Typer(help="Change the drill's engine, as an operator would.", no_args_is_help=True)
app.add_typer(act_app, name="act")

DrillArgument = Annotated[str, typer.Argument(metavar="ID", help="A drill; see `drill list`.")]
StateOption = Annotated[
    Path | None,
    typer.Option("--state", metavar="DIR", help="Where the running drill and journals are kept."),
]
LayerOption = Annotated[int | None, typer.Option(help="MoE layer; without it, every layer.")]
_MARKS = {"pass": "✓", "fail": "✗", "could not run": "?"}
_LOOK_EVERY_S = 0.2
_SIGNALS_EVERY_S = 5.0


@app.command("list")
def list_drills(as_json: JsonOption = False) -> None:
    """List the drills, easiest first."""
    from workbench import drills

    found = drills.list()
    if as_json:
        print_json({"drills": found})
        return
    for drill in found:
        stars = "★" * drill["level"]
        print(f"{drill['id']:<20} {stars:<3}  {drill['minutes']:>3g} min  {drill['title']}")


@app.command()
def show(drill: DrillArgument, as_json: JsonOption = False) -> None:
    """Show what is known when the drill begins: the symptom, the signals, the question."""
    from workbench.drills import find

    briefing = find(drill).briefing
    if as_json:
        print_json(briefing)
    else:
        _print_briefing(_console(), briefing)


@app.command()
def run(
    drill: DrillArgument,
    *,
    state: StateOption = None,
    model: ModelOption = paths.DEFAULT_MODEL,
    seed: Annotated[int | None, typer.Option(help="Another layer, another expert.")] = None,
    minutes: Annotated[float | None, typer.Option(help="How long the fault may last.")] = None,
    rehearse: Annotated[
        str | None,
        typer.Option(
            metavar="WAY",
            help="Walk it without a learner: reference, none, wrong, trail-1, …",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Start a drill and keep it running; work on it from a second terminal. Ctrl-C restores."""
    if rehearse is not None:
        result = _rehearse(drill, rehearse, model, seed, minutes)
    else:
        result = _run(drill, state, model, seed, minutes, as_json)
    if as_json:
        print_json(result)
    else:
        _print_result(_console(), result)
    ended_well = bool(result["proof"]["restored"]) and (
        result["grade"] is None or result["grade"]["passed"]
    )
    if not ended_well:
        raise typer.Exit(1)


@app.command()
def observe(state: StateOption = None, as_json: JsonOption = False) -> None:
    """Measure the signals now, with load, table and policy."""
    from workbench.drills.client import joined

    with joined(state) as drill:
        seen = drill.observe()
    if as_json:
        print_json(seen)
        return
    console = _console()
    _print_verdicts(console, seen["signals"])
    table, policy = seen["table"], seen["policy"]
    console.print(f"\nrows by layer and device ({seen['rows']:,} token rows since the last change)")
    for layer, rows in enumerate(seen["device_rows"]):
        console.print(f"  layer {layer}: {'  '.join(f'{n:>5}' for n in rows)}")
    console.print("rows by layer and expert")
    for layer, rows in enumerate(seen["expert_counts"]):
        console.print(f"  layer {layer}: {'  '.join(f'{n:>5}' for n in rows)}")
    console.print(f"table    version {table['version']}, hash {table['sha256'][:12]}")
    console.print(f"planned  version {table['planned']['version']}, "
                  f"hash {table['planned']['sha256'][:12]}")  # fmt: skip
    console.print(f"policy   {policy}")


@app.command()
def diagnose(
    option: Annotated[str, typer.Argument(help="One of the options `drill show` lists.")],
    state: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Name the cause; the last one named counts."""
    from workbench.drills.client import joined

    with joined(state) as drill:
        said = drill.diagnose(option)
    print_json(said) if as_json else print(f"noted: {said['text']}")


@app.command()
def check(state: StateOption = None, as_json: JsonOption = False) -> None:
    """Run the drill's checks; exit 1 unless all pass."""
    from workbench.drills.client import joined

    with joined(state) as drill:
        found = drill.check()
    if as_json:
        print_json(found)
    else:
        _print_verdicts(_console(), list(found["checks"].values()))
    if any(verdict["outcome"] != "pass" for verdict in found["checks"].values()):
        raise typer.Exit(1)


@app.command()
def hint(state: StateOption = None, as_json: JsonOption = False) -> None:
    """Take the next clue; how many were taken stands in the report."""
    from workbench.drills.client import joined

    with joined(state) as drill:
        clue = drill.hint()
    print_json(clue) if as_json else print(f"{clue['number']} of {clue['of']}: {clue['clue']}")


@app.command()
def finish(state: StateOption = None, as_json: JsonOption = False) -> None:
    """Hand in: check once more, grade, restore the engine and prove it."""
    from workbench.drills.client import joined

    with joined(state) as drill:
        result = drill.finish()
    if as_json:
        print_json(result)
    else:
        _print_result(_console(), result)
    if not result["grade"] or not result["grade"]["passed"]:
        raise typer.Exit(1)


@app.command()
def report(
    journal: Annotated[
        str | None, typer.Argument(help="Part of a journal's name; without it, the newest.")
    ] = None,
    *,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Where the page goes.")
    ] = None,
    state: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a drill's journal as one HTML page that needs nothing else."""
    from workbench.drills.report import page
    from workbench.drills.store import Store

    path, content = Store.at(state).read(journal)
    if as_json:
        print_json(content)
        return
    target = out or path.with_suffix(".html")
    target.write_text(page(content), encoding="utf-8")
    print(target)


@app.command()
def reset(state: StateOption = None, as_json: JsonOption = False) -> None:
    """End whatever drill runs or was left behind, restored; again does nothing."""
    from workbench.drills import reset as run_reset

    done = run_reset(state)
    if as_json:
        print_json(done)
        return
    print(f"{done['found']}: {done['how']}" if done["found"] else done["how"])
    if done["proof"]:
        _print_proof(_console(), done["proof"])


# ---- acts


@act_app.command()
def smooth(
    bonus: Annotated[float, typer.Option(help="In logits; 0 switches it off.")],
    state: StateOption = None,
) -> None:
    """Give the experts of a sequence's previous token a bonus."""
    _act(state, "smooth", bonus=bonus)


@act_app.command()
def bias(
    expert: Annotated[int, typer.Option()],
    value: Annotated[float, typer.Option(help="Added to the expert's logit.")],
    layer: LayerOption = None,
    state: StateOption = None,
) -> None:
    """Add a value to an expert's logit."""
    _act(state, "bias", expert=expert, value=value, layer=layer)


@act_app.command()
def ban(
    expert: Annotated[int, typer.Option()], layer: LayerOption = None, state: StateOption = None
) -> None:
    """Never choose an expert."""
    _act(state, "ban", expert=expert, layer=layer)


@act_app.command()
def force(
    experts: Annotated[list[int], typer.Argument(help="Experts always chosen.")],
    layer: LayerOption = None,
    state: StateOption = None,
) -> None:
    """Always choose these experts."""
    _act(state, "force", experts=experts, layer=layer)


@act_app.command("clear-policy")
def clear_policy(state: StateOption = None) -> None:
    """Forget bans, forced experts, biases and smoothing."""
    _act(state, "clear-policy")


@act_app.command()
def publish(state: StateOption = None) -> None:
    """Publish a whole new table: experts in order, one copy each."""
    _act(state, "publish")


@act_app.command()
def rebalance(
    spare: Annotated[int, typer.Option(help="Room for copies on each device.")] = 1,
    state: StateOption = None,
) -> None:
    """Publish a table planned for the load since the last change."""
    _act(state, "rebalance", spare=spare)


@act_app.command()
def replicate(
    layer: Annotated[int, typer.Option()],
    expert: Annotated[int, typer.Option()],
    spare: Annotated[int, typer.Option(help="Room for copies on each device.")] = 1,
    state: StateOption = None,
) -> None:
    """Publish a table with a copy of one expert on every device."""
    _act(state, "replicate", layer=layer, expert=expert, spare=spare)


@act_app.command()
def move(
    layer: Annotated[int, typer.Option()],
    expert: Annotated[int, typer.Option()],
    device: Annotated[int, typer.Option(help="Where it goes.")],
    state: StateOption = None,
) -> None:
    """Publish a table in which an expert has moved to another device."""
    _act(state, "move", layer=layer, expert=expert, device=device)


def _act(state: Path | None, act: str, **arguments: Any) -> None:
    from workbench.drills.client import joined

    with joined(state) as drill:
        print(drill.act(act, **arguments)["said"])


# ---- running


def _rehearse(
    drill: str, way: str, model: str, seed: int | None, minutes: float | None
) -> dict[str, Any]:
    from workbench.drills.opening import opened
    from workbench.drills.rehearsal import rehearse
    from workbench.drills.scenario import find

    with opened(find(drill), model=model, seed=seed, minutes=minutes) as session:
        return rehearse(session, way)


def _run(
    drill: str,
    state: Path | None,
    model: str,
    seed: int | None,
    minutes: float | None,
    as_json: bool,
) -> dict[str, Any]:
    """Hold the drill's process until it ends or a signal asks; return its result."""
    from engine.errors import MachineError
    from workbench.drills import start
    from workbench.lifecycle import Ended, ending_signals

    with ending_signals():
        try:
            say("starting the engine and taking the steady state; this takes a moment")
            with start(drill, state=state, model=model, seed=seed, minutes=minutes) as running:
                try:
                    if not as_json:
                        _print_briefing(_console(), running.briefing())
                    say("\nThe drill runs. Work on it from a second terminal; Ctrl-C restores.")
                    _hold(running, quiet=as_json)
                except Ended as asked:
                    return running.finish(f"ended by {asked.name}", graded=False)
                result = running.journal().get("result")
        except Ended:
            raise KeyboardInterrupt from None
    if not result:
        raise MachineError(
            "the drill's process has ended without a result, and its engine with it."
        )
    return dict(result)


def _hold(running: Drill, *, quiet: bool) -> None:
    """Wait until the drill's process ends; say now and then how its signals stand."""
    import time
    from contextlib import suppress

    from engine.errors import RequestError

    shown_at = time.monotonic()
    while running.running:
        time.sleep(_LOOK_EVERY_S)
        if quiet or time.monotonic() - shown_at < _SIGNALS_EVERY_S:
            continue
        with suppress(RequestError):  # it may end between two looks
            state = running.state()
            signals = ", ".join(f"{name} {value:.3g}" for name, value in state["signals"].items())
            say(f"{state['elapsed_s']:6.0f} s  {signals or 'gathering rows'}")
        shown_at = time.monotonic()


# ---- printing


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, markup=False, soft_wrap=True)


def _print_briefing(console: Console, briefing: dict[str, Any]) -> None:
    console.print(f"{briefing['title']}  ({briefing['id']}, {briefing['minutes']:g} min)\n")
    console.print(briefing["description"] + "\n")
    console.print("Signals: " + ", ".join(briefing["signals"]))
    console.print(f"\n{briefing['question']}")
    for option, text in briefing["options"].items():
        console.print(f"  {option:<18} {text}")
    console.print("\nworkbench drill observe · hint · act … · check · diagnose OPTION · finish")


def _print_verdicts(console: Console, verdicts: list[dict[str, Any]]) -> None:
    for verdict in verdicts:
        value = "" if verdict["value"] is None else f"{verdict['value']:.3g}"
        before = "" if verdict["steady"] is None else f", before {verdict['steady']:.3g}"
        right = "" if verdict["low"] is None else (
            f" (right: {verdict['low']:.3g} to {verdict['high']:.3g}{before})"
        )  # fmt: skip
        mark = _MARKS[verdict["outcome"]]
        console.print(f"{mark} {verdict['outcome']:<13} {verdict['name']}: {value}{right}")
        if verdict["message"]:
            console.print(f"    {verdict['message']}")


def _print_result(console: Console, result: dict[str, Any]) -> None:
    marks = result["grade"]
    console.print(f"\n{result['drill']}: {result['reason']} after {result['elapsed_s']:g} s, "
                  f"{result['clues']} clues")  # fmt: skip
    if marks:
        for name, part in marks["parts"].items():
            console.print(f"  {name:<20} {part['earned']:>3} of {part['possible']}")
        word = "passed" if marks["passed"] else "not passed"
        console.print(f"  {'together':<20} {marks['points']:>3} of {marks['possible']}: {word}")
        console.print(f"\n{result['solution']}")
    _print_proof(console, result["proof"])


def _print_proof(console: Console, proof: dict[str, Any]) -> None:
    word = "restored" if proof["restored"] else "NOT restored: this engine is thrown away"
    console.print(f"\nThe engine is {word}:")
    for name, part in proof["hashes"].items():
        sign = "=" if part["equal"] else "≠"
        console.print(f"  {name:<8} before {part['before'][:16]} {sign} after {part['after'][:16]}")
