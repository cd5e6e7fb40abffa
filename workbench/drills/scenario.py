"""A drill's file: what is expected, what is broken, what is asked, how it is graded.

The field names are Chaos Toolkit's (title, description, tags, steady-state-hypothesis, method,
rollbacks) with what a lesson needs beside them. A file is validated against
`data/drills/schema.json` and against the probes, actions and acts that exist before anything runs.
The description tells the symptom only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, nearest
from workbench import paths
from workbench.schema import call_faults, read_yaml, schema_faults

REPAIR, HARMLESS = "repair", "harmless"
"""The kinds of check: the symptom is gone; nothing else was broken."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The values that are right: a range, or a range in multiples of the value before the fault."""

    kind: str
    """`range` or `relative`."""
    low: float
    high: float

    def limits(self, steady: float | None) -> tuple[float, float]:
        """Return the lowest and the highest right value.

        Raises:
            ConfigError: a relative tolerance needs the value before the fault, and there is none.
        """
        if self.kind == "range":
            return self.low, self.high
        if steady is None:
            raise ConfigError("this value was not measured before the fault.")
        return self.low * steady, self.high * steady


@dataclass(frozen=True, slots=True)
class Call:
    """A probe or an action by name, with its arguments."""

    name: str
    func: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Probe:
    """Something to measure, and what is right."""

    call: Call
    tolerance: Tolerance


@dataclass(frozen=True, slots=True)
class Check:
    """A question about the engine that is asked to grade the learner."""

    id: str
    title: str
    kind: str
    points: int
    probe: Probe
    messages: Mapping[str, str]
    """By outcome, `pass` and `fail`."""


@dataclass(frozen=True, slots=True)
class Repair:
    """A named series of acts, as a learner would do them."""

    title: str
    acts: tuple[tuple[str, Mapping[str, Any]], ...]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One drill, valid."""

    id: str
    title: str
    description: str
    tags: tuple[str, ...]
    level: int
    minutes: float
    """How long the fault's lease lasts."""
    needs: Mapping[str, int]
    """`devices`: logical devices of the drill's engine."""
    seed: int
    hypothesis: str
    signals: tuple[Probe, ...]
    """The probes of the steady-state hypothesis: right before, wrong while the fault acts."""
    method: tuple[Call, ...]
    rollbacks: tuple[Call, ...]
    stop: tuple[Probe, ...]
    """Limits that end the drill at once."""
    question: str
    options: Mapping[str, str]
    diagnosis_points: int
    checks: tuple[Check, ...]
    clues: tuple[str, ...]
    cause: str
    """The right one of `options`."""
    solution: str
    repairs: tuple[Repair, ...]
    """Each of them is right; the first is the reference."""
    false_trails: tuple[Repair, ...]
    """Each looks right and is not."""

    @property
    def summary(self) -> dict[str, Any]:
        """Return the line of `workbench drill list`."""
        return {
            "id": self.id,
            "title": self.title,
            "level": self.level,
            "minutes": self.minutes,
            "needs": dict(self.needs),
        }

    @property
    def briefing(self) -> dict[str, Any]:
        """Return what a learner may know: everything but cause, clues, checks and solution."""
        return self.summary | {
            "description": self.description,
            "tags": list(self.tags),
            "steady_state": self.hypothesis,
            "signals": [probe.call.name for probe in self.signals],
            "question": self.question,
            "options": dict(self.options),
            "clues": len(self.clues),
        }


def folder() -> Path:
    """Return where the drills' files are."""
    return paths.data("drills")


def scenarios() -> list[Scenario]:
    """Return every drill, easiest first.

    Raises:
        ConfigError: a file is not valid.
    """
    found = [read(path) for path in sorted(folder().glob("*.yaml"))]
    return sorted(found, key=lambda scenario: (scenario.level, scenario.id))


def find(drill: str) -> Scenario:
    """Return one drill by its id.

    Raises:
        ConfigError: there is none, or its file is not valid.
    """
    known = sorted(path.stem for path in folder().glob("*.yaml"))
    if drill not in known:
        raise ConfigError(
            f"unknown drill {drill!r}{nearest(drill, known)} known drills: {', '.join(known)}."
        )
    return read(folder() / f"{drill}.yaml")


def read(path: Path) -> Scenario:
    """Read and validate one file.

    Raises:
        ConfigError: it cannot be read, breaks the schema, or names something that does not exist.
    """
    return parse(read_yaml(path), path.name, drill=path.stem)


def parse(raw: Any, file: str, *, drill: str | None = None) -> Scenario:
    """Validate the contents of a file and return the drill.

    Args:
        raw: what YAML gave.
        file: its name, for messages.
        drill: the id the file must have; None takes any.

    Raises:
        ConfigError: the contents break a rule; the message names file, place and rule.
    """
    for message in schema_faults(raw, folder() / "schema.json"):
        raise ConfigError(f"{file}: {message}")
    scenario = _scenario(raw)
    for message in _faults(scenario, drill):
        raise ConfigError(f"{file}: {message}")
    return scenario


def _scenario(raw: Mapping[str, Any]) -> Scenario:
    steady, solution = raw["steady-state-hypothesis"], raw["solution"]
    return Scenario(
        id=raw["id"],
        title=raw["title"],
        description=raw["description"].strip(),
        tags=tuple(raw["tags"]),
        level=raw["level"],
        minutes=raw["minutes"],
        needs=raw["needs"],
        seed=raw["seed"],
        hypothesis=steady["title"],
        signals=tuple(map(_probe, steady["probes"])),
        method=tuple(map(_call, raw["method"])),
        rollbacks=tuple(map(_call, raw["rollbacks"])),
        stop=tuple(map(_probe, raw["stop-conditions"])),
        question=raw["diagnosis"]["question"],
        options=raw["diagnosis"]["options"],
        diagnosis_points=raw["diagnosis"]["points"],
        checks=tuple(
            Check(
                item["id"],
                item["title"],
                item["kind"],
                item["points"],
                _probe(item["probe"]),
                item["messages"],
            )
            for item in raw["checks"]
        ),
        clues=tuple(clue.strip() for clue in raw["clues"]),
        cause=solution["cause"],
        solution=solution["explanation"].strip(),
        repairs=tuple(map(_repair, solution["repairs"])),
        false_trails=tuple(map(_repair, raw["false-trails"])),
    )


def _call(raw: Mapping[str, Any]) -> Call:
    provider = raw["provider"]
    return Call(raw["name"], provider["func"], provider.get("arguments", {}))


def _probe(raw: Mapping[str, Any]) -> Probe:
    tolerance = raw["tolerance"]
    low, high = tolerance["range"]
    return Probe(_call(raw), Tolerance(tolerance["type"], low, high))


def _repair(raw: Mapping[str, Any]) -> Repair:
    acts = [(act["act"], {key: act[key] for key in act if key != "act"}) for act in raw["acts"]]
    return Repair(raw["title"], tuple(acts))


def _faults(scenario: Scenario, drill: str | None) -> Iterator[str]:
    """Yield what the schema cannot see, one sentence each."""
    from workbench.drills.acts import ACTS
    from workbench.drills.injector import ACTIONS, undone
    from workbench.drills.probes import PROBES

    if drill is not None and scenario.id != drill:
        yield f"id ({scenario.id}) must be the file's name, {drill}."
    probes = (*scenario.signals, *scenario.stop, *(check.probe for check in scenario.checks))
    for probe in probes:
        yield from call_faults("probe", probe.call.func, probe.call.arguments, PROBES)
        if probe.tolerance.low > probe.tolerance.high:
            yield f"probe {probe.call.name!r}: the tolerance's range must ascend."
    for call in (*scenario.method, *scenario.rollbacks):
        yield from call_faults("action", call.func, call.arguments, ACTIONS)
    for repair in (*scenario.repairs, *scenario.false_trails):
        for act, arguments in repair.acts:
            yield from call_faults("act", act, arguments, ACTS, given=2)
    if scenario.cause not in scenario.options:
        yield f"solution.cause ({scenario.cause}) must be one of the diagnosis options."
    ids = [check.id for check in scenario.checks]
    if len(set(ids)) < len(ids):
        yield "every check needs an id of its own."
    points = scenario.diagnosis_points + sum(check.points for check in scenario.checks)
    if points != 100:
        yield f"the points of diagnosis and checks must sum to 100, not {points}."
    yield from undone(scenario.method, scenario.rollbacks)
