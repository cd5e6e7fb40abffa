"""A sink that adds up what a run's steps did: rows by cause, rows by expert, time by stage."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from engine.events import CAUSES, ROUTING_STAGES, Event, StartEvent, StepEvent

_ACCEPTED = CAUSES.index("accepted")


class Tally:
    """Totals over the steps heard so far."""

    enabled = True

    def __init__(self) -> None:
        self.num_steps = 0
        self.rows: Counter[str] = Counter()
        """Rows by cause, as in `engine.events.CAUSES`."""
        self.expert_counts_LE: npt.NDArray[np.int64] = np.zeros((0, 0), np.int64)
        """How often each expert ran an accepted row."""
        self.duration_ms = 0.0
        self.stage_ms: Counter[str] = Counter()
        self.table_version = 0
        self.dropped: list[int] = []
        """By MoE layer: (token, expert) slots that found no room at their expert."""

        self.units: Counter[str] = Counter()
        """Units whose number format was chosen: all, in INT8, and run again."""

    def emit(self, event: Event) -> None:
        """Add one step; a start sets the shape, other events pass by."""
        if isinstance(event, StepEvent):
            self._add(event)
        elif isinstance(event, StartEvent):
            shape = (len(event.moe_layers), event.num_experts)
            self.expert_counts_LE = np.zeros(shape, np.int64)
            self.table_version = event.table_version
            self.dropped = [0] * len(event.moe_layers)

    @property
    def extra_rows(self) -> dict[str, int]:
        """Rows run again or thrown away, by cause."""
        return {cause: n for cause, n in self.rows.items() if cause != "accepted"}

    @property
    def overhead_share(self) -> float:
        """Share of the steps' time spent deciding where tokens go, 0 to 1."""
        deciding = sum(self.stage_ms[stage] for stage in ROUTING_STAGES)
        return deciding / self.duration_ms if self.duration_ms else 0.0

    def _add(self, step: StepEvent) -> None:
        self.num_steps += 1
        self.duration_ms += step.duration_ms
        self.stage_ms.update(step.stage_ms)
        self.table_version = step.table_version
        for place, dropped in enumerate(step.dropped):
            self.dropped[place] += dropped
        for cause, rows in enumerate(np.bincount(step.causes, minlength=len(CAUSES)).tolist()):
            if rows:
                self.rows[CAUSES[cause]] += rows
        for layer in step.units:
            self.units.update(all=layer.units, int8=layer.int8_units, failed=layer.failed_units)
        if again := sum(layer.rerun_rows for layer in step.units):
            self.rows["precision"] += again
        for place, counts_E in enumerate(self.expert_counts_LE):
            chosen = step.topk_ids[step.causes == _ACCEPTED, place]
            counts_E += np.bincount(chosen[chosen >= 0], minlength=len(counts_E))
