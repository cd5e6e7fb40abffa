"""What an operator can read, and how a probe of it is declared.

A probe is a function of `Readings` and of a drill file's arguments that returns one number. It
never learns what a drill has broken. One that has too little to go by raises `Unreadable` with the
reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from engine.events import UnitEvent
from engine.routing.table import RoutingTable
from workbench.trace.schema import Array
from workbench.trace.trace import Trace

ROWS = 400
"""Token rows a probe wants to see unless told otherwise."""


class Unreadable(Exception):
    """A probe could not be taken; the message says why and what to do."""


class TooLittle(Unreadable):
    """Too little has run since the last change; more of it will do."""


@dataclass(frozen=True, slots=True)
class Readings:
    """What an operator has before them."""

    trace: Trace
    """What the engine recorded since the last change anybody made."""
    table_now: RoutingTable | None
    """The routing table the engine reads now; None while none runs."""
    planned: Mapping[str, object]
    """The newest entry of the change record: `version` and `sha256` of the table as planned."""
    ask: Callable[..., Sequence[int]] = field(repr=False)
    """Asks an instance (0 is the first) the known questions; returns the tokens it answered.

    With `drawn` they are answered at temperature 1, whatever the drill else asks for.
    """
    known: Sequence[int] = ()
    """The answers the engine gave before the drill."""
    answered_of: Callable[[], tuple[int, int]] = field(default=lambda: (0, 0), repr=False)
    """Asks at the gateway; returns how many questions were answered, and of how many."""
    choices: Callable[[], Array] = field(default=lambda: np.zeros((0, 0, 0)), repr=False)
    """Returns (N, L, K) the experts of the questions' tokens, as they were asked last."""
    choices_known: Array = field(default_factory=lambda: np.zeros((0, 0, 0)))
    """(N, L, K) the same from before the drill."""
    rows_of_table: int = 0
    """Rows run since the table in force was published, also those from before the last change."""
    units: Sequence[tuple[UnitEvent, ...]] = ()
    """By recorded step: the number formats of each layer, where they are routed."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Of `Deployment.facts`: options, log of starts, ranks, jobs; and the last `canary`."""
    ledger: Mapping[str, Any] = field(default_factory=dict)
    """Of `Ledger.facts`: what became of requests since the last change."""
    published: Path | None = None
    """The model folder as published."""
    folder: Path | None = None
    """The model folder the engine is started from."""

    @property
    def table(self) -> RoutingTable:
        """Return the routing table in force.

        Raises:
            Unreadable: no engine runs.
        """
        if self.table_now is None:
            raise Unreadable("the engine does not run; its log of starts says why.")
        return self.table_now


@dataclass(frozen=True, slots=True)
class ServiceReadings:
    """What an operator has before them of a service, all of it read over HTTP."""

    before: Mapping[str, float]
    """The metrics at the last change: `name{label="value"}` and its value."""
    now: Mapping[str, float]
    """The metrics now."""
    status: Mapping[str, Any]
    """What `/v1/status` says."""
    ranks: Sequence[int]
    """The ranks that took part before the drill."""
    ask: Callable[[], Sequence[str]] = field(repr=False)
    """Asks the known questions; returns the answers."""
    known: Sequence[str] = ()
    """The answers from before the drill."""


AnyReadings = Readings | ServiceReadings


@dataclass(frozen=True, slots=True)
class Meaning:
    """How a probe's value is to be read."""

    unit: str
    """`share` (0 to 1), `ratio`, `count`, `ms` or `s`."""
    formula: str
    live: bool = True
    """Whether it may be sampled all the time; asking questions costs too much for that."""
    remark: str = ""
    """What to know of a value outside of what is right."""


PROBES: dict[str, Callable[..., float]] = {}
"""By name, as drill files call them."""
MEANINGS: dict[str, Meaning] = {}
"""By the probe's name."""


def probe(
    unit: str, formula: str, *, live: bool = True, remark: str = ""
) -> Callable[[Callable[..., float]], Callable[..., float]]:
    """Declare a function as a probe that drill files may call by its name."""

    def declared(function: Callable[..., float]) -> Callable[..., float]:
        PROBES[function.__name__] = function
        MEANINGS[function.__name__] = Meaning(unit, formula, live, remark)
        return function

    return declared


def enough(readings: Readings, rows: int) -> Trace:
    """Return the trace if it holds enough rows.

    Raises:
        Unreadable: it does not, or no engine runs.
    """
    trace = readings.trace
    if trace.num_rows < rows:
        if readings.facts.get("running") is False:
            raise Unreadable("the engine does not run; its log of starts says why.")
        raise TooLittle(
            f"only {trace.num_rows} of the {rows} rows it takes have run since the last change; "
            "try again in a moment."
        )
    return trace
