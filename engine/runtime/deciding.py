"""How much of the engine's time goes into deciding, level by level; always on, read by anyone.

    share of a level = ms in its stages / ms of the steps

The stages of each level are `engine.events.LEVELS`; the gate's product is none of them, because the
model has it whoever routes. The rule of the trade: above 5 % watch it, above 10 % rebuild the
router. A step of one row is often above: deciding costs nearly as much for one row as for thirty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.events import LEVELS

WARN_SHARE, ALARM_SHARE = 0.05, 0.10

FORMULA = "ms in the level's stages / ms of all steps since the start: " + "; ".join(
    f"{level} = {' + '.join(stages)}" for level, stages in LEVELS.items()
)


@dataclass(slots=True)
class Deciding:
    """Sums over all steps of one engine, written by its own thread."""

    step_ms: float = 0.0
    level_ms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LEVELS, 0.0))
    dropped: list[int] = field(default_factory=list)
    """By MoE layer: (token, expert) slots that found no room; [] while none was limited."""
    look_ups: tuple[int, int] = (0, 0)
    """Answers found in tables, and not found."""

    def looked_up(self, sums: tuple[int, int]) -> tuple[int, int]:
        """Take the counts after a step; return how many of each came with it.

        Counts fall when a rank is lost; nothing is said to have come then.
        """
        before, self.look_ups = self.look_ups, sums
        return max(0, sums[0] - before[0]), max(0, sums[1] - before[1])

    def add(
        self, spent_ms: Mapping[str, float], step_ms: float, dropped: Sequence[int] = ()
    ) -> None:
        """Take one step: milliseconds by stage and of the whole, and dropped slots by MoE layer."""
        if dropped:
            sums = self.dropped or [0] * len(dropped)
            self.dropped = [one + more for one, more in zip(sums, dropped, strict=True)]
        self.step_ms += step_ms
        for level, stages in LEVELS.items():
            for stage in stages:
                self.level_ms[level] += spent_ms.get(stage, 0.0)

    @property
    def share(self) -> float:
        """Share of the steps' time spent deciding, 0 to 1."""
        return sum(self.level_ms.values()) / self.step_ms if self.step_ms else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return everything with its formula, fit for JSON."""
        hits, misses = self.look_ups
        return {
            "step_ms": self.step_ms,
            "level_ms": dict(self.level_ms),
            "level_share": {
                level: spent / self.step_ms if self.step_ms else 0.0
                for level, spent in self.level_ms.items()
            },
            "overhead_share": self.share,
            "overhead_state": overhead_state(self.share),
            "formula": FORMULA,
            "look_up_hits": hits,
            "look_up_misses": misses,
        }


def overhead_state(share: float) -> str:
    """Return `alarm` above 10 %, `warning` above 5 %, else `ok`."""
    return "alarm" if share > ALARM_SHARE else "warning" if share > WARN_SHARE else "ok"
