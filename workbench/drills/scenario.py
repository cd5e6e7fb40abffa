"""A drill as records: what is expected, what is broken, what is asked, how it is graded.

`workbench.drills.files` reads them from `data/drills`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.errors import ConfigError

REPAIR, HARMLESS = "repair", "harmless"
"""The kinds of check: the symptom is gone; nothing else was broken."""


def check_minutes(minutes: float) -> None:
    """Refuse a time that no drill may take.

    Raises:
        ConfigError: it is not above 0, or above 120.
    """
    if not 0 < minutes <= 120:
        raise ConfigError(f"minutes ({minutes:g}) must be above 0 and at most 120.")


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
class Deployed:
    """What the drill's engine is, as it is right."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Of `EngineConfig`."""
    files: bool = False
    """Whether it runs from a copy of the model folder."""
    instances: int = 1
    """Engines of these options; all but the first only answer known questions."""
    jobs: Sequence[Mapping[str, Any]] = ()
    """What runs beside it; see `workbench.drills.jobs`."""
    running: int = 16
    """Requests kept going."""
    domain: str | None = None
    """The domain they are from; None mixes all."""
    guest: str = ""
    """A text that a guest asks about now and then, beside the other requests."""
    beginnings: int = 0
    """How many long beginnings the requests share, as clients' instructions; 0 for none."""
    sampled: bool = False
    """Whether known questions are answered by drawing, as traffic is, and not greedily."""


@dataclass(frozen=True, slots=True)
class Safe:
    """How a drill runs on a service that others use: with a fault that delays, never falsifies."""

    fault: str
    """One of `engine.faults.SAFE`."""
    delay_ms: float
    one_rank: bool
    """Whether one rank is late, drawn by the seed, or every one."""
    ranks: int
    """Least number of ranks the service must have."""
    job: str
    """A job that is said to run beside it and to be the cause; "" for none."""
    scenario: Scenario
    """The drill with what is asked and measured there."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One drill, valid."""

    id: str
    title: str
    symptom: str
    """In a few words, for the quick reference."""
    guide: str
    """Where the guides tell of it; "" if they do not."""
    description: str
    tags: tuple[str, ...]
    level: int
    minutes: float
    """How long the fault's lease lasts."""
    needs: Mapping[str, int]
    """`devices`: logical devices of the drill's engine; or `ranks`: its processes."""
    deployed: Deployed
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
    safe: Safe | None = None
    """Set for a drill that may run on a service that others use."""

    @property
    def probes(self) -> list[Probe]:
        """The probes of signals and checks."""
        return [*self.signals, *(check.probe for check in self.checks)]

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
            "safe": self.safe is not None,
        }
