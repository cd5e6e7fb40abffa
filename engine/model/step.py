"""What one forward pass carries through the layers: the batch, the table, the clock, the record."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from engine.events import STAGES, Int64, Spans
from engine.kernels.attention import AttentionPlan
from engine.routing.capacity import Capacity
from engine.routing.gate import GateOutput
from engine.routing.policy import LayerPolicy
from engine.routing.precision import PrecisionStep, Units
from engine.routing.smoothing import Smoother
from engine.routing.table import RoutingTable

_NUMBER = {stage: number for number, stage in enumerate(STAGES)}


class StageClock:
    """Adds up the time between marks by stage; one clock read a mark, no synchronisation.

    The clock's zero is the machine's, so that times of several processes can be compared.
    """

    __slots__ = ("_kept", "_last", "_spent", "began_ns")

    def __init__(self, *, keep: bool = False) -> None:
        """Start; `keep` remembers each stretch of time and not only the sums."""
        self._spent = dict.fromkeys(STAGES, 0)
        self._kept: list[tuple[int, int, int]] | None = [] if keep else None
        self._last = self.began_ns = time.perf_counter_ns()

    def mark(self, stage: str) -> None:
        """Count the time since the last mark as spent in `stage`."""
        now = time.perf_counter_ns()
        self._spent[stage] += now - self._last
        if self._kept is not None:
            self._kept.append((_NUMBER[stage], self._last, now))
        self._last = now

    def add(self, spent_ms: Mapping[str, float]) -> None:
        """Count time that was measured elsewhere since the last mark, and not here again."""
        for stage, milliseconds in spent_ms.items():
            self._spent[stage] += int(milliseconds * 1e6)
        self._last = time.perf_counter_ns()

    @property
    def num_kept(self) -> int:
        """Stretches of time remembered so far."""
        return len(self._kept or ())

    def between(self, first: int, end: int) -> dict[str, float]:
        """Return milliseconds by stage of the stretches `first` to `end`, only those there are."""
        found: dict[str, float] = {}
        for number, begin, over in (self._kept or ())[first:end]:
            stage = STAGES[number]
            found[stage] = found.get(stage, 0.0) + (over - begin) / 1e6
        return found

    def spans(self, origin_ns: int) -> Spans:
        """Return what was kept, in milliseconds since `origin_ns`."""
        kept = np.array(self._kept or (), np.int64).reshape(-1, 3)
        stages, begin, end = kept.T
        return Spans(
            stages.astype(np.uint8),
            ((begin - origin_ns) / 1e6).astype(np.float32),
            ((end - begin) / 1e6).astype(np.float32),
        )

    def spent_ms(self) -> dict[str, float]:
        """Return milliseconds by stage so far."""
        return {stage: spent / 1e6 for stage, spent in self._spent.items()}


@dataclass(slots=True)
class LayerRecord:
    """What one MoE layer decided, as it decided it."""

    gate: GateOutput
    phy_ids_TK: Tensor
    """(T, K) physical experts, -1 for a slot that was dropped."""
    why_TK: Tensor | None = None
    """Why each replica was taken, see `engine.routing.device`; None without replicas."""
    bonus_TE: Tensor | None = None
    """(T, E) what smoothing added to the logits; None while it is off."""
    looked_up: tuple[str, ...] = ()
    """The stages whose answer was found in a table."""
    spans: tuple[int, int] = (0, 0)
    """The first and the end of the clock's stretches that belong to this layer."""
    units: Units | None = None
    """The number formats; None when all rows ran in the engine's own."""


class HostRows(NamedTuple):
    """The batch's rows in host memory, (T,) int64 each; events are built from these."""

    token_ids: Int64
    positions: Int64
    slots: Int64
    homes: Int64
    request_ids: Int64


@dataclass(slots=True)
class StepContext:
    """One step's batch of T rows and what the layers share while it runs."""

    host: HostRows
    token_ids_T: Tensor
    """(T,) int64"""
    positions_T: Tensor
    """(T,) int64"""
    slots_T: Tensor
    """(T,) int64: where each row's key and value go in the flattened cache."""
    homes_T: Tensor
    """(T,) int64: the device whose attention owns the row."""
    plan: AttentionPlan
    table: RoutingTable
    """Read once, here: every layer of the step sees the same version."""
    policies: tuple[LayerPolicy | None, ...]
    """One per MoE layer."""
    clock: StageClock
    records: list[LayerRecord] | None
    """One per MoE layer, in order; None when nobody listens."""
    smoother: Smoother | None = None
    """None while smoothing is off."""
    capacity: Capacity | None = None
    """None while nothing is dropped."""
    precision: PrecisionStep | None = None
    """None while all rows run in the engine's own number format."""
    rotary: tuple[Tensor, Tensor] = field(init=False)
    """cos and sin (T, 1, hd), set by the transformer."""
    places: Tensor = field(init=False)
    """(T · Hkv,) where the cache puts the rows' heads, set by the transformer."""
    bad_rows: int = 0
    """Rows whose gate logits were not finite, summed over layers."""
