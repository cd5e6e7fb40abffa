"""`workbench levels`: the four routing levels in one table, measured."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from workbench import paths
from workbench.options import JsonOption, ModelOption
from workbench.output import print_json

DRAFT_MODEL = "polyglot-draft"


def levels(
    *,
    model: ModelOption = paths.DEFAULT_MODEL,
    tokens: Annotated[int, typer.Option(help="New tokens of a sequence, at most 240.")] = 48,
    rounds: Annotated[int, typer.Option(help="Sequences of each side; medians are shown.")] = 2,
    as_json: JsonOption = False,
) -> None:
    """What each of the four levels decides, how often, what that costs and what it brings."""
    from workbench.bench.levels import run

    folder, draft = paths.model_folder(model), paths.model_folder(DRAFT_MODEL)
    result = run(folder, draft, tokens=tokens, rounds=rounds)
    if as_json:
        print_json(result)
    else:
        _show(result)


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    heads = ("level", "timing", "decisions/s", "of the step", "hit rate", "rows rerun", "gain")
    for head in heads:
        table.add_column(head, justify="left" if head in heads[:2] else "right")
    for row in result["rows"]:
        table.add_row(
            row["level"],
            row["timing"],
            _cell(row["decisions_per_s"], "{:,.0f}"),
            _cell(row["share_of_step"], "{:.1%}"),
            _cell(row["hit_rate"], "{:.0%}"),
            _cell(row["rows_rerun"], "{:,}"),
            _cell(row["gain"], "{:.2f} x"),
        )
    console = Console(highlight=False)
    console.print(table)
    console.print()
    for name, formula in result["formulas"].items():
        console.print(Text(f"{name}: {formula}"), style="dim")
    machine = result["machine"]
    console.print(
        Text(f"{result['label']} on {machine['cpu']}, one thread, load {machine['load_average']}"),
        style="dim",
    )


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
