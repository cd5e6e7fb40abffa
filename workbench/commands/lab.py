"""`workbench lab`: JupyterLab on the lessons."""

from __future__ import annotations

from typing import Annotated

import typer

from workbench.options import JsonOption, LessonsOption


def lab(
    *,
    lessons: LessonsOption = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Set changed copies aside and begin anew.")
    ] = False,
    port: Annotated[
        int, typer.Option(help="First port to try for JupyterLab; the next free one is taken.")
    ] = 8888,
    seconds: Annotated[
        float | None, typer.Option(help="End after so many seconds; without it, on Ctrl-C.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Open your own copies of the lessons in JupyterLab, print the address; Ctrl-C ends it."""
    from workbench.lab import lab as run

    code = run(lessons=lessons, fresh=fresh, port=port, seconds=seconds, as_json=as_json)
    raise typer.Exit(code)
