"""Turn what a step did into its event: once a step, all layers together, numpy at the end."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.events import CAUSES, Decision, StepEvent
from engine.exchange.dispatch import LocalDispatcher
from engine.kernels.combine import combine
from engine.kernels.topk import route
from engine.model.moe import Experts
from engine.model.step import LayerRecord, StepContext
from engine.routing.decision import RowKey, decision_of
from engine.routing.device import Placer
from engine.routing.gate import Gate
from engine.runtime.scheduler import Chunk

_RERUN = CAUSES.index("preemption")


def step_event(
    number: int,
    time_s: float,
    duration_ms: float,
    step: StepContext,
    chunks: list[Chunk],
    *,
    num_running: int,
    num_waiting: int,
    number_format: str,
    moe_layers: tuple[int, ...],
) -> StepEvent:
    """Build the event of one finished step."""
    records = step.records
    assert records is not None, "the step ran without records"
    host, num_rows = step.host, len(step.host.token_ids)
    topk_ids = _stack([r.gate.selection.topk_ids_TK for r in records], np.int16, num_rows)
    identity = step.table.is_identity
    phy_ids = topk_ids
    if not identity:
        phy_ids = _stack([r.phy_ids_TK for r in records], np.int16, num_rows)
    return StepEvent(
        step=number,
        time_s=time_s,
        duration_ms=duration_ms,
        table_version=step.table.version,
        num_running=num_running,
        num_waiting=num_waiting,
        num_prefill_rows=sum(chunk.num_prefill for chunk in chunks),
        request_ids=host.request_ids,
        positions=host.positions.astype(np.int32),
        token_ids=host.token_ids.astype(np.int32),
        homes=host.homes.astype(np.int16),
        causes=_causes(chunks, num_rows),
        topk_ids=topk_ids,
        phy_ids=phy_ids,
        topk_weights=_stack(
            [r.gate.selection.topk_weights_TK for r in records], np.float32, num_rows
        ),
        margins=_margins(records, num_rows),
        stage_ms=step.clock.spent_ms(),
        bad_rows=step.bad_rows,
        decisions=tuple(_decisions(chunks, step, moe_layers, phy_ids, number_format)),
    )


def _stack(columns: list[torch.Tensor], dtype: type[np.generic], num_rows: int) -> Any:
    """Stack L tensors (T, K) to a (T, L, K) array in host memory; a dense model's is (T, 0, 0)."""
    width = columns[0].shape[1] if columns else 0
    stacked = np.empty((num_rows, len(columns), width), dtype)
    for layer, column in enumerate(columns):
        stacked[:, layer] = column.cpu().numpy()
    return stacked


def _margins(records: list[LayerRecord], num_rows: int) -> Any:
    """Return (T, L): score of the last chosen expert minus the runner-up's, inf without one."""
    margins_TL = np.full((num_rows, len(records)), np.inf, dtype=np.float32)
    for layer, record in enumerate(records):
        chosen = record.gate.selection
        assert chosen.ranked_scores_TJ is not None, "the choice came without its explanation"
        ranked, k = chosen.ranked_scores_TJ.cpu().numpy(), chosen.topk_ids_TK.shape[1]
        if ranked.shape[1] > k:
            np.subtract(ranked[:, k - 1], ranked[:, k], out=margins_TL[:, layer])
    return margins_TL


def _causes(chunks: list[Chunk], num_rows: int) -> Any:
    causes = np.zeros(num_rows, dtype=np.uint8)
    if not any(chunk.num_rerun for chunk in chunks):
        return causes
    row = 0
    for chunk in chunks:
        causes[row : row + chunk.num_rerun] = _RERUN
        row += chunk.num_tokens
    return causes


def _decisions(
    chunks: list[Chunk],
    step: StepContext,
    moe_layers: tuple[int, ...],
    phy_ids: Any,
    number_format: str,
) -> Iterator[Decision]:
    """Copy the whole decision of every watched token, layer by layer."""
    assert step.records is not None, "the step ran without records"
    first_row = 0
    for chunk in chunks:
        sequence = chunk.sequence
        watched = sequence.watch and sequence.watch.intersection(range(chunk.start, chunk.end))
        for position in watched:
            row = first_row + position - chunk.start
            token = sequence.token_ids[position]
            key = RowKey(row, sequence.request_id, position, token, sequence.home)
            for place, record in enumerate(step.records):
                yield decision_of(
                    key,
                    place,
                    record.gate,
                    phy_ids[:, place],
                    step.table,
                    layer=moe_layers[place],
                    number_format=number_format,
                    source=sources(),
                )
        first_row += chunk.num_tokens


@functools.cache
def sources() -> tuple[str, ...]:
    """Return where in the code each stage of a token's way stands, in the order of the way."""
    stages: tuple[Callable[..., Any], ...] = (
        Gate.logits,
        route,
        Placer.place,
        LocalDispatcher.dispatch,
        Experts.forward,
        combine,
    )
    root = Path(__file__).parents[2]
    return tuple(
        f"{Path(inspect.getfile(stage)).relative_to(root).as_posix()}:"
        f"{inspect.getsourcelines(stage)[1]}"
        for stage in stages
    )
