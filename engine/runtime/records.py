"""Turn what a step did into its event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.cluster.records import RowRecords
from engine.events import CAUSES, StepEvent
from engine.runtime.runner import StepResult
from engine.runtime.scheduler import Chunk

_ARRAYS = (
    "request_ids",
    "positions",
    "token_ids",
    "homes",
    "topk_ids",
    "phy_ids",
    "topk_weights",
    "margins",
    "formats",
)


def step_event(
    number: int,
    time_s: float,
    duration_ms: float,
    result: StepResult,
    *,
    num_running: int,
    num_waiting: int,
    look_ups: tuple[int, int] = (0, 0),
) -> StepEvent:
    """Build the event of one finished step; rows stand in the order of `result.chunks`.

    `look_ups` are those of the step that were found and not found.
    """
    chunks = result.chunks
    return StepEvent(
        step=number,
        time_s=time_s,
        duration_ms=duration_ms,
        table_version=result.table_version,
        num_running=num_running,
        num_waiting=num_waiting,
        num_prefill_rows=sum(chunk.num_prefill for chunk in chunks),
        causes=_causes(chunks),
        drafted=_drafted(chunks),
        stage_ms=result.clock.spent_ms(),
        bad_rows=result.bad_rows,
        dropped=tuple(result.dropped) if any(result.dropped) else (),
        ranks=tuple(result.ranks),
        spans=result.clock.spans(result.clock.began_ns),
        look_ups_found=look_ups[0],
        look_ups_missed=look_ups[1],
        **_joined(result.records or ()),
    )


def _joined(records: Sequence[RowRecords]) -> dict[str, Any]:
    """Put the ranks' rows one after the other."""
    if len(records) == 1:
        columns = {name: getattr(records[0], name) for name in _ARRAYS}
    else:
        columns = {
            name: np.concatenate([getattr(part, name) for part in records]) for name in _ARRAYS
        }
    decisions = tuple(decision for part in records for decision in part.decisions)
    units = tuple(layer for part in records for layer in part.units)
    return {**columns, "decisions": decisions, "units": units}


def _drafted(chunks: Sequence[Chunk]) -> Any:
    if not any(chunk.num_drafts for chunk in chunks):
        return None
    parts = [np.arange(c.num_tokens) >= c.num_tokens - c.num_drafts for c in chunks]
    return np.concatenate(parts).astype(np.uint8)


def _causes(chunks: Sequence[Chunk]) -> Any:
    causes = np.zeros(sum(chunk.num_tokens for chunk in chunks), dtype=np.uint8)
    row = 0
    for chunk in chunks:
        if chunk.num_rerun:
            causes[row : row + chunk.num_rerun] = CAUSES.index(chunk.sequence.rerun_cause)
        if chunk.proposal and chunk.num_void:
            end = row + chunk.num_tokens
            causes[end - chunk.num_void : end] = CAUSES.index("rejected_draft")
        row += chunk.num_tokens
    return causes
