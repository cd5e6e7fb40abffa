"""The quick reference of troubleshooting, made from the drills' files: symptom to repair.

It is the table that the guides call 5.4 and 8. README and a notebook hold it between two marks, and
a test holds them against what this makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from workbench import paths
from workbench.drills.files import scenarios
from workbench.drills.scenario import Scenario

BEGIN = "<!-- quick reference: made by `workbench drill reference --write` -->"
END = "<!-- end of the quick reference -->"


def table(levels: Sequence[int] = (1, 2, 3)) -> str:
    """Return the reference of drills of these levels as a Markdown table, easiest first.

    Raises:
        ConfigError: a drill's file is not valid.
    """
    head = ("What people see", "What to measure", "Cause", "Repair", "Drill")
    rows = [head, ("---",) * len(head), *(_row(one) for one in scenarios() if one.level in levels)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def block() -> str:
    """Return the table between its marks, as it stands in README."""
    return f"{BEGIN}\n\n{table()}\n\n{END}"


def holders() -> tuple[Path, ...]:
    """Return the files that hold the table."""
    return (paths.root() / "README.md",)


def write(path: Path) -> bool:
    """Put the table between its marks in a file; return whether that changed anything.

    Raises:
        ValueError: the marks are not there.
    """
    text = path.read_text("utf-8")
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"{path.name} has no place for the quick reference.")
    made = f"{before}{block()}{after}"
    path.write_text(made, "utf-8")
    return made != text


def _row(scenario: Scenario) -> tuple[str, ...]:
    repairs = [repair.title for repair in scenario.repairs]
    guide = f" (guide {scenario.guide})" if scenario.guide else ""
    return (
        f"{scenario.symptom}{guide}",
        "; ".join(probe.call.name for probe in scenario.signals),
        scenario.options[scenario.cause].rstrip("."),
        ", or: ".join(repairs),
        f"`{scenario.id}`",
    )
