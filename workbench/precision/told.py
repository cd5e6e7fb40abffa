"""What calibrating and judging found, as tables for people; each part by itself, as it is ready."""

from __future__ import annotations

import sys
from typing import Any

from engine.routing.precision import Thresholds
from engine.routing.precision.thresholds import units_in_words
from workbench.precision.speed import compare_sizes

LEFT = ("why", "way", "unit", "shape", "8 to 16 rows")


def thresholds(found: Thresholds) -> None:
    """Print what suits INT8 in each layer, and why."""
    print(f"INT8 for {units_in_words(found)}, when most of them suit:\n")
    table = _table(
        *("layer", "from position", "margin from", "range to", "check range", "check error"),
    )
    for layer, limits in enumerate(found.layers):
        if limits.whitelist:
            table.add_row(str(layer), "whitelist")
            continue
        table.add_row(
            str(layer),
            str(limits.min_position),
            _limit(limits.min_margin),
            _limit(limits.max_range),
            f"{limits.check.max_range:g}",
            f"{limits.check.max_error:g}",
        )
    _print(table)
    print()
    for layer, limits in enumerate(found.layers):
        full = f"never {', '.join(limits.full_classes)}; " if limits.full_classes else ""
        print(f"layer {layer}: {full}{limits.why}")


def quality(found: dict[str, Any]) -> None:
    """Print what `quality.compare` found."""
    perplexity = found["perplexity"]
    print(
        f"\nPerplexity on {found['tokens']} tokens held out: full {perplexity['full']:.4f}, "
        f"all in INT8 {perplexity['int8']:.4f} ({perplexity['int8_rise']:+.3%}), mixed "
        f"{perplexity['mixed']:.4f} ({perplexity['mixed_rise']:+.3%}); "
        f"{found['int8_share_of_units']:.1%} of units in INT8, "
        f"{found['units']['rerun_rows']} of {found['units']['rows']} rows run again.\n"
    )
    table = _table("layer", "off, median", "p99", "moved, INT8", "p99", "moved, mixed", "p99")
    names = ("error_median", "error_p99", "moved_int8_median", "moved_int8_p99",
             "moved_mixed_median", "moved_mixed_p99")  # fmt: skip
    for row in found["layers"]:
        table.add_row(str(row["layer"]), *(f"{row[name]:.2%}" for name in names))
    _print(table)
    print()
    table = _table("unit", "rows", "INT8 units", "switches/100 rows", "perplexity")
    for row in found["kinds"]:
        table.add_row(
            row["unit"],
            str(row["unit_rows"]),
            f"{row['int8_share_of_units']:.1%}",
            f"{row['switches_per_100_rows']:.2f}",
            f"{row['perplexity_rise']:+.3%}",
        )
    _print(table)


def experts(shapes: list[dict[str, Any]]) -> None:
    """Print the times of the experts alone by unit size, and whether 8 to 16 rows are best."""
    for shape in shapes:
        print(f"\n{shape['name']}, {shape['rows']} rows: full {shape['full_us']:.0f} us, all in "
              f"INT8 {shape['int8_us']:.0f} us")  # fmt: skip
        table = _table(
            *("unit rows", "INT8 rows", "switches", "gathered us", "run by run us"),
            *("half INT8: gathered", "run by run"),
        )
        for row in shape["by_size"]:
            table.add_row(
                str(row["unit_rows"]),
                f"{row['int8_share_of_rows']:.1%}",
                str(row["switches"]),
                f"{row['gathered_us']:.0f}",
                f"{row['run_by_run_us']:.0f}",
                f"{row['half_gathered_us']:.0f}",
                f"{row['half_run_by_run_us']:.0f}",
            )
        _print(table)
    print(
        "\nAre units of 8 to 16 rows the best here? The better of the two, against the best other:"
    )
    for way, compared in compare_sizes(shapes).items():
        print(f"\n{way}:")
        table = _table("shape", "8 to 16 rows", "one row at a time")
        for name, how, one in compared:
            table.add_row(name, how, f"{one:.2f} times")
        _print(table)


def steps(by_phase: dict[str, list[dict[str, Any]]]) -> None:
    """Print the times of whole steps, by format and unit size."""
    for phase, rows in by_phase.items():
        print(f"\nWhole steps, {phase}:")
        table = _table("way", "step ms", "times full", "share of deciding")
        for row in rows:
            table.add_row(
                row["way"],
                f"{row['step_ms']:.2f}",
                f"{row['times_full']:.3f}",
                f"{row['format_share']:.2%}",
            )
        _print(table)


def _limit(value: float) -> str:
    return f"{value:g}" if abs(value) != float("inf") else "-"


def _table(*names: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in names:
        table.add_column(name, justify="left" if name in LEFT else "right")
    return table


def _print(renderable: Any) -> None:
    from rich.console import Console

    Console(highlight=False).print(renderable)
    sys.stdout.flush()  # what reads a pipe wants each part when it is ready
