"""A sink that adds up what the engine did, since the start and over the last half minute.

Written on the engine's thread, read by whoever scrapes, checks alerts or asks for the state. How
long an expert has had no row is told in seconds of the clock up to the last step, a pause of the
whole service counting as `PAUSE_S` at most: an idle night makes no expert idle.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.config import ModelConfig
from engine.events import CAUSES, Event, Float64, Int64, StepEvent
from engine.routing.table import RoutingTable
from engine.runtime.engine import Engine
from engine.runtime.stragglers import Straggler, Stragglers

WINDOW_S = 30
PAUSE_S = 60.0
"""Longest time between two steps that counts when an expert gets no row."""
BALANCES = {
    "balancedness": "mean / max of the rows by device, mean over layers; 1 is even (vLLM, SGLang)",
    "max_violation": "max / mean of the rows by expert, less 1, mean over layers; 0 is even "
    "(Wang et al., Auxiliary-loss-free load balancing, 2024)",
}
"""Both published definitions of balance, by name."""


@dataclass(slots=True)
class _Second:
    """What happened in one second of the clock."""

    number: int
    counts_LE: Int64
    rows_LG: Int64
    step_ms: float = 0.0
    deciding_ms: float = 0.0
    busy_ms: Counter[int] = field(default_factory=Counter)
    latency_s: float = 0.0
    num_ended: int = 0


@dataclass(frozen=True, slots=True)
class Recent:
    """The last half minute, added up."""

    overhead_share: float | None
    """None without steps."""
    mean_latency_s: float | None
    """None without requests that ended."""
    busy_share: dict[int, float]
    """By rank: share of the clock's time it was at work."""
    balance: dict[str, float]
    """By name, see `BALANCES`; empty without rows."""


FORMAT_COUNTS = ("units", "int8_units", "failed_units", "rerun_rows", "switches")
"""What is added up of `engine.events.UnitEvent`."""


class ServeTally:
    """The sums of one service."""

    enabled = True

    def __init__(
        self, model: ModelConfig, num_devices: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        shape = (len(model.moe_layers), max(1, model.num_experts))
        self.counts_LE: Int64 = np.zeros(shape, np.int64)
        """Rows of each expert since the start."""
        self._seen_LE: Float64 = np.zeros(shape, np.float64)
        """When on the clock of `_used_s` each expert had its last row."""
        self._rows_shape = (shape[0], num_devices)
        self.table: RoutingTable | None = None
        """What the engine reads; whoever has the engine keeps it up to date (`look`)."""
        self._used_s = 0.0
        """Seconds from the start to the last step, long pauses shortened."""
        self._last_s = clock()
        """When the last step ended, by `clock`."""
        self.steps = self.bad_rows = 0
        self.step_ms = self.deciding_ms = 0.0
        self.rows: Counter[str] = Counter()
        """Rows by cause."""
        self.formats: Counter[str] = Counter()
        """Of units whose number format was chosen: sums of `engine.events.UnitEvent`'s counts."""
        self.table_version = 0
        """Of the last step."""
        self.rank_versions: dict[int, int] = {}
        """By rank: the table of the last step it took part in."""
        self._stragglers = Stragglers()
        self._seconds: deque[_Second] = deque()

    def emit(self, event: Event) -> None:
        """Add one step."""
        if not isinstance(event, StepEvent):
            return
        with self._lock:
            now = self._clock()
            self._used_s += min(now - self._last_s, PAUSE_S)
            self._last_s = now
            self._add(event, self._second())
            self._stragglers.add(event)

    def ended(self, latency_s: float) -> None:
        """Count a request that has ended."""
        with self._lock:
            second = self._second()
            second.latency_s += latency_s
            second.num_ended += 1

    def forget_rank(self, rank: int) -> None:
        """Expect nothing of a rank that was taken out."""
        with self._lock:
            self.rank_versions.pop(rank, None)

    def look(self, engine: Engine) -> None:
        """Take up the table in force; on the engine's thread."""
        self.table = engine.table

    def recent(self) -> Recent:
        """Return what the last half minute was like."""
        with self._lock:
            self._second()
            seconds = list(self._seconds)
        step_ms = sum(one.step_ms for one in seconds)
        ended = sum(one.num_ended for one in seconds)
        busy: Counter[int] = Counter()
        for one in seconds:
            busy.update(one.busy_ms)
        span_ms = 1e3 * (seconds[-1].number - seconds[0].number + 1)
        return Recent(
            sum(one.deciding_ms for one in seconds) / step_ms if step_ms else None,
            sum(one.latency_s for one in seconds) / ended if ended else None,
            {rank: min(1.0, spent / span_ms) for rank, spent in sorted(busy.items())},
            balance(
                np.sum([one.counts_LE for one in seconds], axis=0),
                np.sum([one.rows_LG for one in seconds], axis=0),
            ),
        )

    def idle_LE(self) -> Float64:
        """Return the seconds from each expert's last row, or the start, to the last step.

        Pauses of the whole service count as `PAUSE_S` at most.
        """
        with self._lock:
            idle: Float64 = self._used_s - self._seen_LE
            return idle

    def straggler(self) -> Straggler | None:
        """Return the rank that holds up the others, if there is one."""
        with self._lock:
            return self._stragglers.named()

    def summary(self) -> dict[str, Any]:
        """Return the sums since the start, fit for JSON."""
        with self._lock:
            return {
                "steps": self.steps,
                "rows": dict(self.rows),
                "bad_rows": self.bad_rows,
                "expert_counts": self.counts_LE.tolist(),
                "overhead_share": self.deciding_ms / self.step_ms if self.step_ms else None,
                "table_version": self.table_version,
            }

    def _add(self, event: StepEvent, second: _Second) -> None:
        deciding_ms = event.overhead_share * event.duration_ms
        second.step_ms += event.duration_ms
        second.deciding_ms += deciding_ms
        self.step_ms += event.duration_ms
        self.deciding_ms += deciding_ms
        self.steps += 1
        self.bad_rows += event.bad_rows
        for cause, rows in enumerate(np.bincount(event.causes).tolist()):
            self.rows[CAUSES[cause]] += rows
        for layer in event.units:
            self.formats.update({name: getattr(layer, name) for name in FORMAT_COUNTS})
        counts_LE = _counted(event.topk_ids, self.counts_LE.shape[1])
        if len(counts_LE):
            self.counts_LE += counts_LE
            second.counts_LE += counts_LE
            self._seen_LE[counts_LE > 0] = self._used_s
        self.table_version = event.table_version
        table = self.table
        if table is not None and table.version == event.table_version and len(counts_LE):
            devices_TLK = table.rank_of_phy[event.phy_ids]
            devices_TLK = np.where(event.phy_ids >= 0, devices_TLK, -1)
            second.rows_LG += _counted(devices_TLK, table.num_devices)
        for rank in event.ranks:
            second.busy_ms[rank.rank] += rank.busy_ms  # type: ignore[assignment]
            self.rank_versions[rank.rank] = event.table_version
        if not event.ranks:
            second.busy_ms[0] += event.duration_ms  # type: ignore[assignment]

    def _second(self) -> _Second:
        """Return the bucket of now, and let go of those that are too old."""
        number = int(self._clock())
        if not self._seconds or self._seconds[-1].number < number:
            rows_LG = np.zeros(self._rows_shape, np.int64)
            self._seconds.append(_Second(number, np.zeros_like(self.counts_LE), rows_LG))
        while self._seconds[0].number <= number - WINDOW_S:
            self._seconds.popleft()
        return self._seconds[-1]


def balance(counts_LE: Int64, rows_LG: Int64) -> dict[str, float]:
    """Return the balance by both definitions; empty without rows.

    Counts [6, 2, 0, 0] by expert: a violation of 6 / 2 - 1 = 2. Rows [30, 10] by device: a
    balancedness of 20 / 30.
    """
    found = {}
    if rows_LG.size and rows_LG.any():
        used_LG = rows_LG[rows_LG.any(axis=1)]
        found["balancedness"] = float((used_LG.mean(axis=1) / used_LG.max(axis=1)).mean())
    if counts_LE.size and counts_LE.any():
        used_LE = counts_LE[counts_LE.any(axis=1)]
        found["max_violation"] = float((used_LE.max(axis=1) / used_LE.mean(axis=1)).mean() - 1)
    return found


def _counted(ids_TLK: Any, num_units: int) -> Int64:
    """Return (L, X) how often each of X units stands in (T, L, K) ids; -1 is none."""
    layers = ids_TLK.shape[1]
    ids = ids_TLK.astype(np.int64)
    flat = (ids + num_units * np.arange(layers)[:, None])[ids >= 0]
    return np.bincount(flat, minlength=layers * num_units).reshape(layers, num_units)
