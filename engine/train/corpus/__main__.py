"""`python -m engine.train.corpus`: rebuild data/corpus from its package sources."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from engine.errors import WorkbenchError
from engine.train.corpus.build import Built, build
from engine.train.data import CORPUS

HEADER = (
    "| domain | source | package | version | licence | documents | train bytes | held-out bytes |",
    "|---|---|---|---|---|---|---|---|",
)


def main(arguments: list[str] | None = None) -> int:
    """Build the corpus, print the table of its sources, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m engine.train.corpus", description=__doc__)
    parser.add_argument("--out", type=Path, default=CORPUS, help="folder to write (%(default)s)")
    parser.add_argument(
        "--work", type=Path, default=Path("build/corpus"), help="packages and their files"
    )
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    try:
        report = build(options.work, options.out)
    except WorkbenchError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print("\n".join([*HEADER, *map(_row, report)]))
    return 0


def _row(built: Built) -> str:
    source = built.source
    return (
        f"| {source.domain} | {source.name} | {source.package} | {built.version} |"
        f" {source.licence} | {built.num_documents} | {built.train_bytes:,} |"
        f" {built.heldout_bytes:,} |"
    )


if __name__ == "__main__":
    sys.exit(main())
