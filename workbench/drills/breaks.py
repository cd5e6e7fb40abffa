"""Every action that a drill's file may name, by what it breaks."""

from __future__ import annotations

from workbench.drills import breaks_deploy, breaks_gate, breaks_ranks, breaks_table
from workbench.drills.injector import ACTIONS, Target, undone

__all__ = [
    "ACTIONS",
    "Target",
    "breaks_deploy",
    "breaks_gate",
    "breaks_ranks",
    "breaks_table",
    "undone",
]
