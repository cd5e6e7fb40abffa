"""Check what is asked for, run it, write the report: for `workbench bench gpu` and the script."""

from __future__ import annotations

import json
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import MachineError, RequestError, nearest
from workbench import paths
from workbench.bench.gpu import report, runner
from workbench.bench.machine import probe

MOST_TUNE_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run gave."""

    report: report.Report
    text: str
    """The report's page; all of the report as JSON where its files could not be written."""
    well: bool
    """Whether everything ran, was right, and is kept."""


def measure(
    *,
    out: Path | None,
    names: Sequence[str],
    tune_seconds: int | None,
    dry: bool,
    say: Callable[[str], None],
) -> Outcome:
    """Run sections, write the report and return it.

    Args:
        out: folder of the report; None is `data/benchmarks`, not for a dry run.
        names: sections; none means all.
        tune_seconds: for tiles; 0 leaves them, None takes the section's own.
        dry: whether to check the script on the CPU; nothing is measured then.
        say: told of each section as it ends, and where the report is.

    Raises:
        RequestError: a name, a number or the folder is not allowed; nothing has run then.
        MachineError: no GPU is there, and it is no dry run, or temporary files have no room.
    """
    _check(names, tune_seconds)
    folder = _folder(out, dry)
    if not dry:
        _require_gpu()
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the sections as well
    try:
        found = runner.run(names=names, tune_seconds=tune_seconds, dry=dry, out=folder, say=say)
    finally:
        signal.signal(signal.SIGTERM, before)
    try:
        as_json, as_page = report.write(found, folder)
    except OSError as wrong:
        say(f"the report cannot be kept in {folder}: {wrong.strerror}; all of it is on stdout.")
        return Outcome(found, json.dumps(found, indent=1), False)
    say(f"written: {as_json}, {as_page}")
    return Outcome(found, report.page(found), runner.well(found))


def _check(names: Sequence[str], tune_seconds: int | None) -> None:
    known = runner.known_sections()
    for name in names:
        if name not in known:
            raise RequestError(
                f"--section {name!r} is not one of {', '.join(known)}{nearest(name, known)}"
            )
    if tune_seconds is not None and not 0 <= tune_seconds <= MOST_TUNE_SECONDS:
        raise RequestError(
            f"--tune ({tune_seconds}) must lie between 0 and {MOST_TUNE_SECONDS} seconds."
        )


def _folder(asked: Path | None, dry: bool) -> Path:
    """Return the report's folder; a dry run has no place among the measurements."""
    if asked is None and dry:
        raise RequestError("a dry run measures nothing; name a folder for its report with --out.")
    folder = asked or paths.root() / "data" / "benchmarks"
    try:
        probe(folder)
    except OSError as wrong:
        raise RequestError(f"--out ({folder}) cannot be written: {wrong.strerror}.") from None
    try:
        probe(Path(tempfile.gettempdir()))
    except OSError as wrong:
        reason = wrong.strerror or wrong
        raise MachineError(f"TMPDIR's folder cannot be written: {reason}.") from None
    return folder


def _require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise MachineError(
            f"torch {torch.__version__} sees no NVIDIA GPU here;"
            " --dry-run checks the script itself on the CPU."
        )
