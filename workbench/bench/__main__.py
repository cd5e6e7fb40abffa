"""`python -m workbench.bench NAME`: the measurements on a machine without the command line's needs.

Takes the defaults and prints the JSON report; options are the command `workbench bench`'s.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module

from engine.errors import WorkbenchError
from workbench import paths

NAMES = tuple("startup recorder decode dashboard gate moe_layer dispatch routing_overhead".split())


def main() -> int:
    """Run one benchmark and print its report."""
    parser = argparse.ArgumentParser(prog="python -m workbench.bench", description=__doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--model", default=paths.DEFAULT_MODEL, help="folder or bundled name")
    asked = parser.parse_args()
    try:
        report = import_module(f"workbench.bench.{asked.name}").run(paths.model_folder(asked.model))
    except WorkbenchError as wrong:
        print(wrong, file=sys.stderr)
        return wrong.exit_code
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
