"""`python -m workbench.bench.gpu`: run the sections on this machine's GPU and write the report."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from engine.errors import MachineError, RequestError, WorkbenchError, nearest
from workbench import paths
from workbench.bench.gpu import report, runner


def main(argv: list[str] | None = None) -> int:
    """Run what was asked for; 0 when everything ran and was right, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m workbench.bench.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder of the report; default data/benchmarks")
    parser.add_argument(
        "--section",
        action="append",
        default=[],
        metavar="NAME",
        help="may be repeated; without it all of " + ", ".join(runner.known_sections()),
    )
    parser.add_argument("--tune", type=int, metavar="SECONDS", help="for tiles; 0 leaves it out")
    parser.add_argument(
        "--dry-run", action="store_true", help="on the CPU, interpreted, tiny shapes; no figures"
    )
    asked = parser.parse_args(argv)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the sections as well
    try:
        _check(asked.section, asked.tune, asked.dry_run)
        folder = _folder(asked.out, asked.dry_run)
        found = runner.run(
            names=asked.section,
            tune_seconds=asked.tune,
            dry=asked.dry_run,
            out=folder,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
    except WorkbenchError as wrong:
        print(f"bench gpu: {wrong}", file=sys.stderr)
        return wrong.exit_code
    finally:
        signal.signal(signal.SIGTERM, before)
    as_json, as_page = report.write(found, folder)
    print(as_page.read_text(encoding="utf-8"))
    print(f"written: {as_json}, {as_page}", file=sys.stderr)
    return 0 if runner.well(found) else 1


def _check(names: list[str], tune_seconds: int | None, dry: bool) -> None:
    known = runner.known_sections()
    for name in names:
        if name not in known:
            raise RequestError(
                f"--section {name!r} is not one of {', '.join(known)}{nearest(name, known)}"
            )
    if tune_seconds is not None and not 0 <= tune_seconds <= 120:
        raise RequestError(f"--tune ({tune_seconds}) must lie between 0 and 120 seconds.")
    if not dry:
        _require_gpu()


def _require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise MachineError(
            f"torch {torch.__version__} sees no NVIDIA GPU here;"
            " --dry-run checks the script itself on the CPU."
        )


def _folder(asked: Path | None, dry: bool) -> Path:
    """Return the report's folder; a dry run has no place among the measurements.

    Raises:
        RequestError: a dry run without a folder, or the folder cannot be made.
    """
    if asked is None and dry:
        raise RequestError("a dry run measures nothing; name a folder for its report with --out.")
    folder = asked or paths.root() / "data" / "benchmarks"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as wrong:
        raise RequestError(f"--out ({folder}) cannot be made: {wrong.strerror}.") from None
    return folder


if __name__ == "__main__":
    sys.exit(main())
