"""Drills: break a running engine, find out why, repair it, prove it.

    from workbench import drills
    drills.list()
    with drills.start("routing-jitter") as drill:
        drill.observe(), drill.hint(), drill.act("smooth", bonus=1.2)
        drill.diagnose("restless-gate")
        print(drill.finish()["grade"])

A drill's engine is a process of its own: it ends with whoever started it, every fault has a lease,
and at the end hashes prove that all is as it was.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from engine.errors import ConfigError
from workbench.drills.client import Drill, attach, start
from workbench.drills.files import find, scenarios
from workbench.drills.resetting import reset

__all__ = ["Drill", "attach", "find", "list", "reset", "start", "surprise"]


def list() -> Sequence[dict[str, Any]]:
    """Return every drill's id, title, level, minutes and needs, easiest first."""
    return [scenario.summary for scenario in scenarios()]


def surprise(level: int, seed: int | None = None) -> str:
    """Return the id of a drill of a level, drawn at random.

    Raises:
        ConfigError: there is none of this level.
    """
    known = [scenario.id for scenario in scenarios() if scenario.level == level]
    if not known:
        raise ConfigError(f"level ({level}) must be 1, 2 or 3.")
    return random.Random(seed).choice(known)
