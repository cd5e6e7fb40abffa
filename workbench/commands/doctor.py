"""`workbench doctor`: this machine against what is needed."""

from __future__ import annotations

from dataclasses import asdict

import typer

from workbench import paths
from workbench.options import JsonOption, ModelOption
from workbench.output import print_json


def doctor(model: ModelOption = paths.DEFAULT_MODEL, as_json: JsonOption = False) -> None:
    """Examine this machine; exit 1 when something needed is missing."""
    from workbench.doctor import Check, examine, worst

    checks: list[Check] = []
    for check in examine(model):
        checks.append(check)
        if not as_json:
            advice = f"\n{'':22}{check.advice}" if check.advice else ""
            print(f"{check.status:<5} {check.name:<15} {check.found}{advice}", flush=True)
    status = worst(checks)
    if as_json:
        print_json({"status": status, "checks": [asdict(check) for check in checks]})
    else:
        print(
            {
                "ok": "\nEverything is here.",
                "warn": "\nReady, with the limits named above.",
                "fail": "\nSomething needed is missing; mend what says fail.",
            }[status]
        )
    if status == "fail":
        raise typer.Exit(1)
