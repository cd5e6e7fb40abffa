"""Named places where a drill can break a running engine.

Each engine owns one `Faults`; a component asks its point before the guarded line:

    if (fault := faults.gate_logits) is not None:
        logits_TE = fault(logits_TE)

With no fault set that is one attribute read and one comparison. It is read once, because another
thread may heal it in between. Faults are set and cleared through
`engine.runtime.control` only, which records both as events and enforces the lease.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.errors import FaultError, nearest

Fault = Callable[[Any], Any]
"""Takes the value at the point and returns the value to go on with; may sleep, wait or raise."""

POINTS: dict[str, str] = {
    "embed.rows": "token ids (T,) and their vectors (T, D), before the first layer",
    "gate.logits": "the gate's logits (T, E) fp32, before any policy or selection",
    "gate.lock": "called with None before each gate decision; hold a lock or sleep to make it wait",
    "gate.capacity": "the rows each expert may take in a layer, while a capacity factor is set",
    "dispatch.send": "rows (R, D) on their way to the experts, ordered by physical expert",
    "experts.compute": "the experts' output rows (R, D), before combine",
    "experts.prepare": "moved experts (gate_up, down) of a layer, before kernels make of them",
    "weights.load": "each tensor read from the checkpoint, before it is copied",
    "table.publish": "the routing table about to be published",
    "table.unsafe_publish": "whether a table passed its canary on the ranks; True keeps a bad one",
    "table.stage": "the routing table whose experts a rank is about to gather; sleep to be late",
    "draft.propose": "the draft's logits (B, V) fp32, before it proposes; shift them: a misfit",
    "precision.predict": "which tokens (T,) bool of a layer are predicted to suit INT8",
    "precision.vote": "the formats (R,) int8 of a layer's rows, after the vote of their units",
    "precision.check": "which units (U,) bool of a layer failed the check and are run again",
    "sampler.noise": "the logits (B, V) fp32 about to be sampled from",
}
"""Every fault point and the value it is given."""

ONLY_IN_DRILLS = ("table.unsafe_publish",)
"""Points that only an engine opened for a drill lets anybody set: they switch a safeguard off."""


@dataclass(frozen=True, slots=True)
class Delay:
    """A fault that only takes time: whatever passes the point goes on unchanged."""

    seconds: float

    def __call__(self, value: Any) -> Any:
        """Sleep, then return the value."""
        time.sleep(self.seconds)
        return value


@dataclass(frozen=True, slots=True)
class SafeFault:
    """A fault an engine that serves may be given: it is late for a while, and never wrong."""

    point: str
    most_ms: float
    words: str
    """What it does, for people."""

    def of(self, delay_ms: float) -> Delay:
        """Return the fault.

        Raises:
            FaultError: the delay is not above 0 or longer than `most_ms`.
        """
        if not 0 < delay_ms <= self.most_ms:
            raise FaultError(
                f"delay_ms ({delay_ms:g}) must be above 0 and at most {self.most_ms:g} at "
                f"{self.point}."
            )
        return Delay(delay_ms / 1e3)


SAFE = {
    "slow-gate": SafeFault("gate.lock", 50.0, "every gate decision waits"),
    "slow-send": SafeFault("dispatch.send", 50.0, "rows leave late for their experts"),
    "slow-experts": SafeFault("experts.compute", 50.0, "the experts take longer"),
    "slow-publish": SafeFault("table.publish", 5000.0, "a new table is published late"),
    "slow-staging": SafeFault("table.stage", 5000.0, "ranks gather the experts of a table late"),
}
"""The faults that may be set from outside on an engine that somebody uses, by name."""


class Faults:
    """The faults set in one engine: one attribute per point, None when healthy."""

    __slots__ = tuple(point.replace(".", "_") for point in POINTS)

    embed_rows: Fault | None
    gate_logits: Fault | None
    gate_lock: Fault | None
    gate_capacity: Fault | None
    dispatch_send: Fault | None
    experts_compute: Fault | None
    experts_prepare: Fault | None
    weights_load: Fault | None
    table_publish: Fault | None
    table_unsafe_publish: Fault | None
    table_stage: Fault | None
    draft_propose: Fault | None
    precision_predict: Fault | None
    precision_vote: Fault | None
    precision_check: Fault | None
    sampler_noise: Fault | None

    def __init__(self) -> None:
        for point in POINTS:
            self.clear(point)

    def set(self, point: str, fault: Fault) -> None:
        """Set `fault` at `point`, replacing what was there.

        Raises:
            FaultError: `point` is not one of `POINTS`, or `fault` cannot be called.
        """
        if not callable(fault):
            raise FaultError(f"fault ({fault!r}) must be a function of the value at the point.")
        setattr(self, _attribute(point), fault)

    def clear(self, point: str) -> None:
        """Heal `point`; healing a healthy point is fine.

        Raises:
            FaultError: `point` is not one of `POINTS`.
        """
        setattr(self, _attribute(point), None)

    def active(self) -> tuple[str, ...]:
        """Return the points at which a fault is set, in the order of `POINTS`."""
        return tuple(point for point in POINTS if getattr(self, _attribute(point)) is not None)


def _attribute(point: str) -> str:
    if not isinstance(point, str) or point not in POINTS:
        raise FaultError(
            f"unknown fault point {point!r}{nearest(point, POINTS)} known points: "
            f"{', '.join(POINTS)}."
        )
    return point.replace(".", "_")
