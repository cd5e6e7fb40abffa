"""What a step means to its requests' books: how far each has come, and rows that ran again."""

from __future__ import annotations

from engine.runtime.runner import StepResult
from engine.runtime.scheduler import Scheduler


def enter(result: StepResult, scheduler: Scheduler, conditions: bytes | None) -> None:
    """Move each sequence's marks past the rows that have run, and count those that ran again.

    Args:
        result: of the step.
        scheduler: learns which blocks of the cache are full.
        conditions: what all of the rows ran under, see `Control.conditions`; None shares none.
    """
    for chunk in result.chunks:
        sequence = chunk.sequence
        if again := chunk.num_rerun:
            sequence.extra_rows[sequence.rerun_cause] += again
        sequence.num_computed = chunk.end - chunk.num_drafts
        sequence.high_water = max(sequence.high_water, sequence.num_computed)
    scheduler.computed(result.chunks, conditions)
    _enter_precision(result)


def _enter_precision(result: StepResult) -> None:
    """Add the expert rows that failed units ran again to their requests' books."""
    if (rerun_T := result.rerun_T) is None or not rerun_T.any():
        return
    row = 0
    for chunk in result.chunks:
        if again := int(rerun_T[row : row + chunk.num_tokens].sum()):
            chunk.sequence.extra_rows["precision"] += again
        row += chunk.num_tokens
