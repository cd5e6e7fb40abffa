"""Name the rank everybody waits for, and say whether it computes slowly, sends slowly or has more.

All ranks of a step end it together, so the step's length says nothing. What tells them apart is
what each rank did before the others could go on: the slow one hardly waits. Reads recorded steps
only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.events import Float64, RankEvent, StepEvent

WINDOW_STEPS = 20
LEAST_STEPS = 5
LEAST_EXCESS_MS = 10.0
"""Per step; below it a rank is never named."""
LEAST_RATIO = 3.0
"""How many times the others' median a rank must take, by time and by row."""

KINDS = {"experts": "compute", "attention": "compute", "dispatch": "communication"}
"""What it means when a rank is slow in a stage."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """One rank that holds up the others."""

    rank: int
    kind: str
    """`compute` (its experts or attention are slow) or `communication` (it sends late)."""
    excess_ms: float
    """Per step, beyond the median of the others."""
    waited_ms: float
    """What the others waited for it per step, in the median."""
    steps: int
    """Over how many steps this was measured."""


class Stragglers:
    """Watches the last steps of an engine on ranks."""

    def __init__(self, window: int = WINDOW_STEPS) -> None:
        self._steps: deque[tuple[RankEvent, ...]] = deque(maxlen=window)

    def add(self, step: StepEvent) -> None:
        """Take in a step; one without ranks, or with others than before, starts anew."""
        if self._steps and [r.rank for r in self._steps[-1]] != [r.rank for r in step.ranks]:
            self._steps.clear()
        if len(step.ranks) > 1:
            self._steps.append(tuple(step.ranks))

    def named(self) -> Straggler | None:
        """Return who holds up the others, or None.

        A rank that takes longer because more rows came to its experts, or because more tokens
        live on it, takes no longer per row and is not named: that is load, not slowness.
        """
        if len(self._steps) < LEAST_STEPS:
            return None
        ranks = [event.rank for event in self._steps[-1]]
        run_G, sent_G = (
            np.maximum(np.mean([count(step) for step in self._steps], axis=0), 1)
            for count in (_rows_run, _rows_sent)
        )
        waits_G = np.median([[r.wait_ms + r.transfer_ms for r in s] for s in self._steps], axis=0)
        found = []
        for stage, kind in KINDS.items():
            rows_G = run_G if stage == "experts" else sent_G
            spent_G = np.median([[r.stage_ms[stage] for r in s] for s in self._steps], axis=0)
            index = int(spent_G.argmax())
            excess_ms = spent_G[index] - _others(spent_G, index)
            slower = _ratio(spent_G, index)
            slower_by_row = _ratio(spent_G / rows_G, index)
            if excess_ms >= LEAST_EXCESS_MS and min(slower, slower_by_row) >= LEAST_RATIO:
                waited_ms = _others(waits_G, index)
                found.append(
                    Straggler(
                        ranks[index], kind, float(excess_ms), float(waited_ms), len(self._steps)
                    )
                )
        return max(found, key=lambda one: one.excess_ms, default=None)


def _rows_run(step: Sequence[RankEvent]) -> Float64:
    """Return by rank the rows its experts ran, whoever sent them."""
    received = np.sum([event.rows for event in step], axis=0)
    return np.array([received[event.rank] for event in step], dtype=np.float64)


def _rows_sent(step: Sequence[RankEvent]) -> Float64:
    """Return by rank the rows its own tokens sent, which are as many for each token."""
    return np.array([event.rows.sum() for event in step], dtype=np.float64)


def _others(values_G: Float64, index: int) -> float:
    return float(np.median(np.delete(values_G, index)))


def _ratio(values_G: Float64, index: int) -> float:
    return float(values_G[index] / max(_others(values_G, index), 1e-9))
