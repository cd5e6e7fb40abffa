"""What a drill goes through before it runs, told to whoever waits for it."""

from __future__ import annotations

from collections.abc import Callable

STAGES = {
    "engine": "The engine starts and loads its model",
    "traffic": "Traffic runs and is recorded",
    "answers": "Known questions are asked and the answers written down",
    "measuring": "Every signal and check is measured before the fault",
    "fault": "The undo is registered, then the fault is set",
}
"""What a drill goes through before it runs, in order."""

Tell = Callable[[str, int, int], None]
"""Takes a stage, and how many of how many of its parts are done; 0 of 0 where it has none."""


def untold(stage: str, done: int, of: int) -> None:
    """Tell nobody."""
