"""Walk a drill without a learner: what must pass passes, what must fail fails.

`make` targets, tests and authors of drills use it; it runs in the calling process.
"""

from __future__ import annotations

from typing import Any

from engine.errors import ConfigError, nearest
from workbench.drills.checks import FAIL, judge
from workbench.drills.course import Course
from workbench.drills.scenario import Repair, Scenario
from workbench.drills.session import Session

REFERENCE, NONE, WRONG = "reference", "none", "wrong"


def ways(scenario: Scenario) -> dict[str, bool]:
    """Return the ways a drill can be walked, and whether each must pass.

    `reference` is the right cause and the first repair, `repair-N` a further one, `none` the right
    cause and no repair, `wrong` another cause and the first repair, `trail-N` a false trail.
    """
    further = {f"repair-{n}": True for n in range(2, len(scenario.repairs) + 1)}
    trails = {f"trail-{n}": False for n in range(1, len(scenario.false_trails) + 1)}
    return {REFERENCE: True, **further, NONE: False, WRONG: False, **trails}


def rehearse(session: Course, way: str = REFERENCE) -> dict[str, Any]:
    """Prepare, break, walk one of `ways`, finish.

    Returns:
        The session's result with `signals`, the verdicts while the fault acted, and `expected`,
        whether the way had to pass.

    Raises:
        ConfigError: there is no such way.
        MachineError: the engine was not steady.
    """
    scenario = session.scenario
    known = ways(scenario)
    if way not in known:
        raise ConfigError(f"way ({way}) must be one of {', '.join(known)}{nearest(way, known)}")
    session.prepare()
    session.break_it()
    signals = {signal["name"]: signal for signal in session.observe()["signals"]}
    session.diagnose(_cause(scenario, way))
    repair = _repair(scenario, way)
    for act, arguments in repair.acts if repair else ():
        session.act(act, **arguments)
    result = session.finish()
    return {
        **result,
        "way": way,
        "expected": known[way],
        "signals": signals,
        "symptom": [name for name, signal in signals.items() if signal["outcome"] == FAIL],
        "checks": {name: verdict.as_dict() for name, verdict in session.verdicts.items()},
    }


def healthy(session: Session) -> dict[str, str]:
    """Run every check and every signal on an engine nobody has broken; all must pass."""
    session.prepare()
    session.window.clear()
    session.phase = "running"
    session.check()
    found = {name: verdict.outcome for name, verdict in session.verdicts.items()}
    readings = session.readings()
    for probe in session.scenario.signals:
        found[probe.call.name] = judge(probe, readings, session.steady).outcome
    session.finish(graded=False)
    return found


def _cause(scenario: Scenario, way: str) -> str:
    if way == WRONG:
        return next(option for option in scenario.options if option != scenario.cause)
    return scenario.cause


def _repair(scenario: Scenario, way: str) -> Repair | None:
    if way == NONE:
        return None
    kind, _, number = way.partition("-")
    if kind == "trail":
        return scenario.false_trails[int(number) - 1]
    return scenario.repairs[int(number or 1) - 1]
