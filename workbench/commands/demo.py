"""`workbench demo`: show routing to a team, on a running engine, step by step."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench import paths
from workbench.options import JsonOption, ModelOption
from workbench.output import print_json, say

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from workbench.demos.player import Check
    from workbench.demos.playlist import Step

app = typer.Typer(help="Show routing to a team, step by step.", no_args_is_help=True)

DemoArgument = Annotated[str, typer.Argument(metavar="ID", help="A demo; see `demo list`.")]
RunningOption = Annotated[int, typer.Option(help="Requests kept running.")]
ThreadsOption = Annotated[
    int | None, typer.Option(help="Threads of one product; without it, the engine's own choice.")
]
_MARKS = {"holds": "✓", "late": "✗", "waiting": "·"}


@app.command("list")
def list_demos(as_json: JsonOption = False) -> None:
    """List the demos."""
    from workbench import demos

    found = demos.list()
    if as_json:
        print_json({"demos": found})
        return
    for demo in found:
        print(f"{demo['id']:<26} {demo['minutes']:>3g} min  {demo['steps']} steps  {demo['title']}")


@app.command()
def play(
    demo: DemoArgument,
    *,
    headless: Annotated[
        bool, typer.Option("--headless", help="Go through all steps and check what is expected.")
    ] = False,
    model: ModelOption = paths.DEFAULT_MODEL,
    running: RunningOption = 8,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Play a demo in the terminal; with --headless exit 0 only if every expectation holds."""
    from engine.errors import ConfigError
    from workbench import demos
    from workbench.lifecycle import Ended, ending_signals

    if as_json and not headless:
        raise ConfigError("--json needs --headless; a demo played by hand has nothing to report.")
    playlist = demos.find(demo)
    try:
        with ending_signals():
            say("starting the engine and asking the known questions; this takes a moment")
            with demos.opened(playlist, model=model, running=running, threads=threads) as player:
                player.prepare()
                if not headless:
                    from workbench.demos.terminal import drive

                    drive(player)
                    return
                steps = player.rehearse(None if as_json else _print_step)
            restored = player.restored
    except Ended:
        say("the demo has ended; the engine is as it was at the start")
        raise KeyboardInterrupt from None
    report = _report(playlist.summary, steps, restored)
    if as_json:
        print_json(report)
    else:
        print(f"\n{_verdict(report)}")
    if not report["passed"]:
        raise typer.Exit(1)


@app.command()
def present(
    demo: DemoArgument,
    *,
    model: ModelOption = paths.DEFAULT_MODEL,
    port: Annotated[
        int, typer.Option(help="First port to try for the dashboard; the next free one is taken.")
    ] = 5006,
    running: RunningOption = 8,
    threads: Annotated[
        int | None, typer.Option(help="Threads of one product; without it, half of the cores.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Start engine and dashboard; print a link for the presenter and one for the viewers."""
    from workbench import demos
    from workbench.demos.present import present as run
    from workbench.lifecycle import Ended, ending_signals

    playlist = demos.find(demo)
    say("starting an engine and its page; the addresses come in a moment")
    try:
        with ending_signals():
            run(
                playlist,
                ready=_print_links_as_json if as_json else _print_links,
                model=model,
                port=port,
                running=running,
                threads=threads,
            )
    except Ended as ended:
        say(f"{ended.name}: the demo has ended, and everything with it")


def _print_links(links: Mapping[str, Any]) -> None:
    print(f"\n  Presenter  {links['presenter_url']}\n  Viewers    {links['viewer_url']}\n")
    print(
        "  The presenter's link drives the demo: keep it to yourself. Ctrl-C ends it.", flush=True
    )


def _print_links_as_json(links: Mapping[str, Any]) -> None:
    print(json.dumps(dict(links)), flush=True)


def _report(summary: dict[str, Any], steps: list[Any], restored: bool) -> dict[str, Any]:
    passed = restored and all(step["passed"] for step in steps)
    return {**summary, "passed": passed, "restored": restored, "steps": steps}


def _verdict(report: dict[str, Any]) -> str:
    checks = [check for step in report["steps"] for check in step["checks"]]
    held = sum(check["state"] == "holds" for check in checks)
    put_back = "as it was" if report["restored"] else "NOT as it was"
    return f"{held} of {len(checks)} expectations hold; the engine is {put_back} at the start"


def _print_step(step: Step, checks: Sequence[Check]) -> None:
    from workbench.demos.words import check_line

    print(f"\n{step.title}")
    for check in checks:
        print(f"  {_MARKS[check.state]} {check_line(check.report)}", flush=True)
