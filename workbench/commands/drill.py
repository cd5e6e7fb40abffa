"""`workbench drill`: break a running engine, find out why, repair it, prove it.

`run` keeps the drill's engine alive in one terminal; the other commands speak to it from a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from workbench import paths
from workbench.commands import drill_act
from workbench.commands.drill_run import held, rehearsed
from workbench.commands.scale import KeyFileOption
from workbench.options import JsonOption, ModelOption, StateOption
from workbench.output import print_json, say

app = typer.Typer(help="Find and repair faults in a running engine.", no_args_is_help=True)
app.add_typer(drill_act.app, name="act")

DrillArgument = Annotated[str, typer.Argument(metavar="ID", help="A drill; see `drill list`.")]


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
def show(
    drill: Annotated[
        str | None, typer.Argument(metavar="ID", help="A drill; without it, the one that runs.")
    ] = None,
    state: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what is known when the drill begins: the symptom, the signals, the question.

    Without an ID it shows the drill that runs, an incident without what it is called.
    """
    from workbench.drills import find
    from workbench.drills.client import joined
    from workbench.drills.words import briefing_text

    if drill is not None:
        briefing = find(drill).briefing
    else:
        with joined(state) as running:
            briefing = running.briefing()
    if as_json:
        if briefing.get("surprise"):  # its name says what it is
            del briefing["id"]
        print_json(briefing)
    else:
        print(briefing_text(briefing))


@app.command()
def run(
    drill: DrillArgument,
    *,
    state: StateOption = None,
    model: ModelOption = paths.DEFAULT_MODEL,
    seed: Annotated[int | None, typer.Option(help="Another layer, another expert.")] = None,
    minutes: Annotated[float | None, typer.Option(help="How long the fault may last.")] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Run it on this service instead of an engine of its own. Needs a key with the "
            "scopes infer, observe and operate; only drills whose file marks a fault as safe.",
        ),
    ] = None,
    key_file: KeyFileOption = None,
    rehearse: Annotated[
        str | None,
        typer.Option(
            metavar="WAY",
            help="Walk it without a learner: reference, none, wrong, trail-1, …",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Start a drill and keep it running; work on it from a second terminal. Ctrl-C restores.

    With --target the service itself holds the drill on a lease: it puts back whatever was changed
    when the drill ends, and by itself when this command is killed.
    """
    from workbench.drills.words import result_text
    from workbench.remote import read_key

    where = None if target is None else (target, read_key(key_file))
    if where is None and key_file is not None:
        say("--key-file has no effect without --target")
    if where is not None and model != paths.DEFAULT_MODEL:
        say("--model has no effect with --target: the service has a model of its own")
    if rehearse is not None:
        result = rehearsed(drill, rehearse, model, seed, minutes, where)
    else:
        result = held(drill, state, model, seed, minutes, as_json, where=where)
    if as_json:
        print_json(result)
    else:
        print(result_text(result))
    ended_well = bool(result["proof"]["restored"]) and (
        result["grade"] is None or result["grade"]["passed"]
    )
    if not ended_well:
        raise typer.Exit(1)


@app.command()
def incident(
    *,
    level: Annotated[int, typer.Option(min=1, max=3, help="How hard it may be.")] = 1,
    state: StateOption = None,
    model: ModelOption = paths.DEFAULT_MODEL,
    seed: Annotated[int | None, typer.Option(help="Draws the same incident again.")] = None,
    minutes: Annotated[float | None, typer.Option(help="How long the fault may last.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Start a surprise for a team: what it is stays hidden until it ends. Ctrl-C restores.

    Others work on it together, each in a terminal or on the page Drills. WORKBENCH_WHO=NAME puts a
    name beside what you do; `drill debrief` shows afterwards who did what.
    """
    from workbench.drills import surprise
    from workbench.drills.words import result_text

    result = held(surprise(level, seed), state, model, seed, minutes, as_json, surprise=True)
    if as_json:
        print_json(result)
    else:
        print(result_text(result))
    if not (result["proof"]["restored"] and (result["grade"] or {"passed": True})["passed"]):
        raise typer.Exit(1)


@app.command()
def remark(
    text: Annotated[str, typer.Argument(help="For the others and for the debrief.")],
    state: StateOption = None,
) -> None:
    """Write a remark into the running drill's journal."""
    from workbench.drills.client import joined

    with joined(state) as drill:
        print(f"noted: {drill.remark(text)['said']}")


@app.command()
def debrief(
    journal: Annotated[
        str | None, typer.Argument(help="Part of a journal's name; without it, the newest.")
    ] = None,
    state: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show who did what when in a drill that has ended."""
    from engine.errors import MachineError
    from workbench.drills.store import Store
    from workbench.drills.words import debrief_text

    store = Store.at(state)
    if journal is None and store.busy:
        raise MachineError("the drill still runs; hand it in with `workbench drill finish` first.")
    content = store.read(journal)[1]
    print_json({"events": content.get("events", [])}) if as_json else print(debrief_text(content))


@app.command()
def observe(state: StateOption = None, as_json: JsonOption = False) -> None:
    """Measure the signals now, with load, table and policy."""
    from workbench.drills.client import joined
    from workbench.drills.words import observation_text, told_lines

    with joined(state) as drill:
        seen = drill.observe()
        told = drill.state()
    print_json(seen) if as_json else print(observation_text(seen), *told_lines(told), sep="\n")


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
    from workbench.drills.words import verdicts_text

    with joined(state) as drill:
        found = drill.check()
    if as_json:
        print_json(found)
    else:
        print(verdicts_text(found["checks"].values()))
    if any(verdict["outcome"] != "pass" for verdict in found["checks"].values()):
        raise typer.Exit(1)


@app.command()
def hint(state: StateOption = None, as_json: JsonOption = False) -> None:
    """Take the next clue; how many were taken stands in the report."""
    from workbench.drills.client import joined
    from workbench.drills.words import clue_text

    with joined(state) as drill:
        clue = drill.hint()
    print_json(clue) if as_json else print(clue_text(clue))


@app.command()
def finish(state: StateOption = None, as_json: JsonOption = False) -> None:
    """Hand in: check once more, grade, restore the engine and prove it."""
    from workbench.drills.client import joined
    from workbench.drills.words import result_text

    with joined(state) as drill:
        if drill.state()["diagnosis"] is None:
            say("no cause was named, which earns nothing for it; checking and grading all the same")
        result = drill.finish()
    if as_json:
        print_json(result)
    else:
        print(result_text(result))
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
    from engine.errors import ConfigError, MachineError
    from workbench.drills.report import page
    from workbench.drills.store import Store

    store = Store.at(state)
    path, content = store.read(journal)
    if journal is None and store.busy:
        say(f"a drill still runs; this is the one before it, {content['briefing']['title']}")
    if as_json:
        print_json(content)
        if out is None:
            return
    target = out or path.with_suffix(".html")
    try:
        html = page(content).encode("utf-8")
    except (LookupError, TypeError, AttributeError, ValueError):  # whatever is not as we write it
        raise MachineError(f"{path} is damaged: it lacks what a report shows.") from None
    try:
        target.write_bytes(html)
    except OSError as wrong:
        raise ConfigError(f"--out ({target}) cannot be written: {wrong.strerror}.") from None
    say(str(target)) if as_json else print(target)


@app.command()
def reference(
    write: Annotated[
        bool, typer.Option("--write", help="Put it into README, where its marks are.")
    ] = False,
) -> None:
    """Print the quick reference: symptom, signals, cause, repair, drill."""
    from workbench.drills import reference as made

    if not write:
        print(made.table())
        return
    for path in made.holders():
        changed = made.write(path)
        print(f"{path.name}: {'written' if changed else 'was up to date'}")


@app.command()
def reset(
    state: StateOption = None, key_file: KeyFileOption = None, as_json: JsonOption = False
) -> None:
    """End whatever drill runs or was left behind, restored; exit 1 if that is not proven.

    What was left at a service is ended there, which needs its key.
    """
    from workbench.drills import reset as run_reset
    from workbench.drills.words import proof_text
    from workbench.remote import read_key

    done = run_reset(state, read_key(key_file))
    if as_json:
        print_json(done)
    else:
        print(f"{done['found']}: {done['how']}" if done["found"] else done["how"])
        if done["proof"]:
            print(proof_text(done["proof"]))
    if done["found"] and not (done["proof"] and done["proof"]["restored"]):
        raise typer.Exit(1)
