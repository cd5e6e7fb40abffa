"""`workbench start`: the engine at work on mixed traffic, dashboard and JupyterLab beside it."""

from __future__ import annotations

from typing import Annotated

import typer

from workbench import paths
from workbench.options import (
    JsonOption,
    LessonsOption,
    ModelOption,
    RanksOption,
)


def start(
    *,
    model: ModelOption = paths.DEFAULT_MODEL,
    port: Annotated[
        int, typer.Option(help="First port to try for the dashboard; the next free one is taken.")
    ] = 5006,
    devices: Annotated[
        int | None,
        typer.Option(
            help="Logical devices the experts are spread over; with --ranks each rank is one.",
            show_default="4",
        ),
    ] = None,
    ranks: RanksOption = 1,
    running: Annotated[int, typer.Option(help="Requests kept running.")] = 8,
    threads: Annotated[
        int | None,
        typer.Option(help="Threads of one product; without it, half of the cores."),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="End after so many seconds; without it, on Ctrl-C.")
    ] = None,
    lab: Annotated[bool, typer.Option(help="Also run JupyterLab on the lessons.")] = True,
    lab_port: Annotated[
        int, typer.Option(help="First port to try for JupyterLab; the next free one is taken.")
    ] = 8888,
    lessons: LessonsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start engine, dashboard and JupyterLab, print the addresses; Ctrl-C ends all of it."""
    from workbench.start import start as run

    code = run(
        model=model,
        port=port,
        devices=devices,
        ranks=ranks,
        running=running,
        threads=threads,
        seconds=seconds,
        lab=lab,
        lab_port=lab_port,
        lessons=lessons,
        as_json=as_json,
    )
    raise typer.Exit(code)
