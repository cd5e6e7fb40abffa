"""Judge probes against their tolerances: pass, fail, or could not run. Grade from that.

Checks know readings and numbers only; nothing in here or in `probes` can see what was broken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from engine.errors import WorkbenchError
from workbench.drills.probes import MEANINGS, PROBES, AnyReadings, Unreadable
from workbench.drills.scenario import HARMLESS, REPAIR, Check, Probe, Scenario

PASS, FAIL, COULD_NOT_RUN = "pass", "fail", "could not run"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one probe or check found."""

    name: str
    outcome: str
    """`PASS`, `FAIL` or `COULD_NOT_RUN`."""
    value: float | None
    steady: float | None
    """The value before the fault."""
    low: float | None
    high: float | None
    """What is right, ends included."""
    unit: str
    formula: str
    message: str

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def measure(probe: Probe, readings: AnyReadings) -> float:
    """Take one probe.

    Raises:
        Unreadable: there is too little to go by.
    """
    return PROBES[probe.call.func](readings, **probe.call.arguments)


def judge(probe: Probe, readings: AnyReadings, steady: Mapping[str, float]) -> Verdict:
    """Take one probe and hold it against its tolerance.

    Args:
        probe: what to measure and what is right.
        readings: what the operator sees.
        steady: values before the fault, by `key`.
    """
    meaning, before = MEANINGS[probe.call.func], steady.get(key(probe))
    value: float | None = None
    low: float | None = None
    high: float | None = None
    try:
        low, high = probe.tolerance.limits(before)
        value = measure(probe, readings)
        outcome = PASS if low <= value <= high else FAIL
        message = meaning.remark if outcome == FAIL else ""
    except (Unreadable, WorkbenchError) as wrong:
        outcome, message = COULD_NOT_RUN, str(wrong)
    except Exception as wrong:  # a probe that breaks says nothing about the engine
        outcome, message = COULD_NOT_RUN, f"the probe itself failed: {wrong!r}"
    return Verdict(
        probe.call.name, outcome, value, before, low, high, meaning.unit, meaning.formula, message
    )


def key(probe: Probe) -> str:
    """Name a measurement: two probes with the same function and arguments share it."""
    arguments = sorted(probe.call.arguments.items())
    return probe.call.func + "".join(f" {name}={value}" for name, value in arguments)


def signals_of(scenario: Scenario, steady: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return each signal's name, key, unit, formula and limits, for the journal."""
    return [
        {
            "name": probe.call.name,
            "key": key(probe),
            "unit": MEANINGS[probe.call.func].unit,
            "formula": MEANINGS[probe.call.func].formula,
            "limits": list(probe.tolerance.limits(steady.get(key(probe), 0.0))),
        }
        for probe in scenario.signals
    ]


def examine(
    checks: Sequence[Check], readings: AnyReadings, steady: Mapping[str, float]
) -> dict[str, Verdict]:
    """Run checks; returns the verdict of each by its id."""
    verdicts = {}
    for check in checks:
        found = judge(check.probe, readings, steady)
        message = check.messages.get(found.outcome, found.message)
        verdicts[check.id] = Verdict(**found.as_dict() | {"name": check.title, "message": message})
    return verdicts


def grade(
    scenario: Scenario, diagnosis: str | None, verdicts: Mapping[str, Verdict], acts: int
) -> dict[str, Any]:
    """Return the points for cause, repair and harmlessness, and whether the drill is passed.

    Points for breaking nothing else are given only together with a repair: doing nothing at all
    breaks nothing either.
    """

    def earned(kind: str) -> int:
        return sum(
            check.points
            for check in scenario.checks
            if check.kind == kind and verdicts[check.id].outcome == PASS
        )

    possible = {
        kind: sum(check.points for check in scenario.checks if check.kind == kind)
        for kind in (REPAIR, HARMLESS)
    }
    named = diagnosis == scenario.cause
    repair = earned(REPAIR) if acts else 0
    harmless = earned(HARMLESS) if acts and repair == possible[REPAIR] else 0
    parts: dict[str, dict[str, Any]] = {
        "cause": {
            "earned": scenario.diagnosis_points if named else 0,
            "possible": scenario.diagnosis_points,
        },
        "repair": {"earned": repair, "possible": possible[REPAIR]},
        "nothing else broken": {"earned": harmless, "possible": possible[HARMLESS]},
    }
    if not acts or repair < possible[REPAIR]:
        parts["nothing else broken"]["remark"] = "counts only once repaired"
    points = sum(part["earned"] for part in parts.values())
    return {"passed": points == 100, "points": points, "possible": 100, "parts": parts}
