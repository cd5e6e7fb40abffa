"""`workbench precision`: find what suits INT8, and say what choosing formats by unit is worth."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.config.checks import at_least, one_of, within
from workbench import paths
from workbench.options import JsonOption, ModelOption, ThresholdsOption
from workbench.output import print_json, say

app = typer.Typer(help="Number formats by unit of rows: thresholds and their worth.",
                  no_args_is_help=True)  # fmt: skip

MAX_WINDOWS = 1024
"""Of each domain; more would take the whole corpus, for hours."""

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
    from workbench.precision import engines, texts, told, worth

    one_of("unit", unit, KINDS)
    _check(model, windows, length)
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
        told.thresholds(found)
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
    from workbench.precision import engines, told, worth
    from workbench.precision.speed import Listener

    _check(model, windows, length)
    at_least("rounds", rounds, 0)
    heard = Listener()
    engine, found, path = engines.open_both(
        model, thresholds=thresholds, threads=threads, measuring=False, sink=heard
    )
    if not as_json:
        told.thresholds(found)
    shown: dict[str, Callable[[Any], None]] = {
        "quality": told.quality,
        "experts": told.experts,
        "steps": told.steps,
    }
    result = {"thresholds_file": str(path), "thresholds": worth.plain(found)}
    with closing(engine):
        for name, part in worth.parts(
            engine, heard, found, windows=windows, length=length, rounds=rounds, say=say
        ):
            result[name] = part
            if part and name in shown and not as_json:
                shown[name](part)
    if as_json:
        print_json(result)


def _check(model: str, windows: int, length: int) -> None:
    from engine.checkpoint.load import read_config

    within("windows", windows, 1, MAX_WINDOWS)
    within("length", length, 16, read_config(paths.model_folder(model)).max_position_embeddings)


def _flat(by_domain: dict[str, list[list[int]]]) -> list[list[int]]:
    return [window for some in by_domain.values() for window in some]
