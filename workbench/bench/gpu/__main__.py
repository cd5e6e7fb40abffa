"""`python -m workbench.bench.gpu`: run the sections on this machine's GPU and write the report."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from engine.errors import WorkbenchError
from workbench.bench.machine import require_triton


def main(argv: list[str] | None = None) -> int:
    """Run what was asked for; 0 when everything ran and was right, 1 otherwise."""
    try:
        require_triton()
    except WorkbenchError as wrong:
        print(f"bench gpu: {wrong}", file=sys.stderr)
        return wrong.exit_code
    from workbench.bench.gpu import entry, runner

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
    try:
        outcome = entry.measure(
            out=asked.out,
            names=asked.section,
            tune_seconds=asked.tune,
            dry=asked.dry_run,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
    except WorkbenchError as wrong:
        print(f"bench gpu: {wrong}", file=sys.stderr)
        return wrong.exit_code
    print(outcome.text)
    return 0 if outcome.well else 1


if __name__ == "__main__":
    sys.exit(main())
