"""`workbench precision`: find what suits INT8, and say what choosing formats by unit is worth."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.config.checks import at_least, one_of
from workbench import paths
from workbench.options import JsonOption, ModelOption, ThresholdsOption
from workbench.output import print_json, say

app = typer.Typer(help="Number formats by unit of rows: thresholds and their worth.",
                  no_args_is_help=True)  # fmt: skip

WindowsOption = Annotated[
    int, typer.Option("--windows", metavar="N", help="Stretches of text of each domain.")
]
LengthOption = Annotated[int, typer.Option("--length", metavar="N", help="Tokens of a stretch.")]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", metavar="N", help="Of one product; as torch has it.")
]


@app.callback()
def precision() -> None:
    """Number formats by unit of rows: thresholds and their worth."""


@app.command()
def calibrate(
    *,
    model: ModelOption = paths.DEFAULT_MODEL,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to store; precision.json in the model's folder."),
    ] = None,
    unit: Annotated[
        str, typer.Option(metavar="expert|sequence", help="What a unit is.")
    ] = "expert",
    unit_rows: Annotated[int, typer.Option(help="Rows of a unit.")] = 16,
    max_rise: Annotated[
        float, typer.Option(help="How much worse perplexity may be, as a share.")
    ] = 0.01,
    windows: WindowsOption = 6,
    length: LengthOption = 256,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare full and mixed precision layer by layer, and store thresholds and whitelist."""
    from engine.config.checks import number
    from engine.errors import ConfigError
    from engine.routing.precision import KINDS, Thresholds
    from workbench.precision import calibrate as calibration
    from workbench.precision import engines, texts, worth

    one_of("unit", unit, KINDS)
    _check(windows, length)
    if not 0 < number("max_rise", max_rise) <= 1:
        raise ConfigError(f"max_rise ({max_rise}) must be above 0 and at most 1, like 0.01.")
    engine, base, path = engines.open_both(model, threads=threads, measuring=True)
    path = out or path
    with closing(engine):
        Thresholds.check_place(path)
        found, measured = calibration.calibrate(
            engine,
            _flat(texts.windows(engine.tokenizer, "train", windows, length)),
            weights_sha256=base.weights_sha256,
            unit=unit,
            unit_rows=unit_rows,
            max_rise=max_rise,
            say=say,
        )
    found.save(path, measured)
    if as_json:
        print_json({"stored": str(path), "thresholds": worth.plain(found), "measured": measured})
    else:
        _show_thresholds(found)
        say(f"stored in {path}")


@app.command()
def report(
    *,
    model: ModelOption = paths.DEFAULT_MODEL,
    thresholds: ThresholdsOption = None,
    windows: WindowsOption = 4,
    length: LengthOption = 256,
    rounds: Annotated[int, typer.Option(help="Repetitions of the timing; 0 times nothing.")] = 5,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Judge the stored thresholds on text held out: error by layer, perplexity, shares, speed."""
    from workbench.precision import engines, worth
    from workbench.precision.speed import Listener

    _check(windows, length)
    at_least("rounds", rounds, 0)
    heard = Listener()
    engine, found, path = engines.open_both(
        model, thresholds=thresholds, threads=threads, measuring=False, sink=heard
    )
    with closing(engine):
        result = worth.report(engine, heard, found, windows=windows, length=length, rounds=rounds)
    result = {"thresholds_file": str(path), "thresholds": worth.plain(found)} | result
    if as_json:
        print_json(result)
    else:
        _show_thresholds(found)
        _show_worth(result)


def _check(windows: int, length: int) -> None:
    at_least("windows", windows, 1)
    at_least("length", length, 16)


def _flat(by_domain: dict[str, list[list[int]]]) -> list[list[int]]:
    return [window for some in by_domain.values() for window in some]


def _table(*names: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in names:
        table.add_column(name, justify="left" if name in ("why", "way", "unit") else "right")
    return table


def _print(renderable: Any) -> None:
    from rich.console import Console

    Console(highlight=False).print(renderable)


def _show_thresholds(found: Any) -> None:
    from engine.routing.precision.thresholds import units_in_words

    print(f"INT8 for {units_in_words(found)}, when most of them suit:\n")
    table = _table(
        "layer", "from position", "not classes", "margin from", "range to", "check", "why"
    )
    for layer, limits in enumerate(found.layers):
        if limits.whitelist:
            table.add_row(str(layer), "", "whitelist", "", "", "", limits.why)
            continue
        table.add_row(
            str(layer),
            str(limits.min_position),
            ", ".join(limits.full_classes) or "-",
            _limit(limits.min_margin),
            _limit(limits.max_range),
            f"range {limits.check.max_range:g}, error {limits.check.max_error:g}",
            limits.why,
        )
    _print(table)


def _limit(value: float) -> str:
    return f"{value:g}" if abs(value) != float("inf") else "-"


def _show_worth(result: dict[str, Any]) -> None:
    perplexity, quality = result["quality"]["perplexity"], result["quality"]
    print(
        f"\nPerplexity on {quality['tokens']} tokens held out: full {perplexity['full']:.4f}, "
        f"all in INT8 {perplexity['int8']:.4f} ({perplexity['int8_rise']:+.3%}), mixed "
        f"{perplexity['mixed']:.4f} ({perplexity['mixed_rise']:+.3%}); "
        f"{quality['int8_share_of_units']:.1%} of units in INT8, "
        f"{quality['units']['rerun_rows']} of {quality['units']['rows']} rows run again.\n"
    )
    table = _table("layer", "off, median", "p99", "moved, INT8", "p99", "moved, mixed", "p99")
    names = ("error_median", "error_p99", "moved_int8_median", "moved_int8_p99",
             "moved_mixed_median", "moved_mixed_p99")  # fmt: skip
    for row in quality["layers"]:
        table.add_row(str(row["layer"]), *(f"{row[name]:.2%}" for name in names))
    _print(table)
    print()
    table = _table("unit", "rows", "INT8 units", "switches/100 rows", "perplexity")
    for row in quality["kinds"]:
        table.add_row(
            row["unit"],
            str(row["unit_rows"]),
            f"{row['int8_share_of_units']:.1%}",
            f"{row['switches_per_100_rows']:.2f}",
            f"{row['perplexity_rise']:+.3%}",
        )
    _print(table)
    for shape in result["experts"]:
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
    for phase, rows in result["steps"].items():
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
    if result["verdict"]:
        print(f"\n{result['verdict']}")
