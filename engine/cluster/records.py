"""Copy out what a step decided: once a step, all layers together, numpy at the end."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.events import (
    Decision,
    Float32,
    Int16,
    Int32,
    Int64,
    UInt8,
    UnitEvent,
    no_formats,
)
from engine.exchange.dispatch import LocalDispatcher
from engine.kernels.combine import combine
from engine.kernels.topk import route
from engine.model.batch import Span
from engine.model.moe import Experts
from engine.model.step import LayerRecord, StepContext
from engine.routing.decision import Circumstances, RowKey, decision_of
from engine.routing.device import Placer
from engine.routing.gate import Gate
from engine.routing.precision import PrecisionStep
from engine.routing.speculation import num_kept


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRecords:
    """What one rank's T rows did in one step, in host memory; shapes as in `StepEvent`."""

    request_ids: Int64
    positions: Int32
    token_ids: Int32
    homes: Int16
    topk_ids: Int16
    phy_ids: Int16
    topk_weights: Float32
    margins: Float32
    decisions: tuple[Decision, ...]
    formats: UInt8 = field(default_factory=no_formats)
    units: tuple[UnitEvent, ...] = ()


def row_records(
    step: StepContext,
    spans: Sequence[Span],
    drawn: Sequence[int],
    gates: Mapping[int, Gate],
    number_format: str,
) -> RowRecords:
    """Copy out what a step that kept records decided.

    Args:
        step: the step, after it ran.
        spans: what it ran.
        drawn: the tokens that the target drew, span by span, one more than the span has drafts.
        gates: by the model's number of each MoE layer, in order.
        number_format: in which the experts ran.
    """
    records = step.records
    assert records is not None, "the step ran without records"
    host, num_rows = step.host, len(step.host.token_ids)
    topk_ids = _stack([r.gate.selection.topk_ids_TK for r in records], np.int16, num_rows)
    phy_ids = topk_ids
    if not step.table.is_identity or step.capacity is not None:
        phy_ids = _stack([r.phy_ids_TK for r in records], np.int16, num_rows)
    return RowRecords(
        request_ids=host.request_ids,
        positions=host.positions.astype(np.int32),
        token_ids=host.token_ids.astype(np.int32),
        homes=host.homes.astype(np.int16),
        topk_ids=topk_ids,
        phy_ids=phy_ids,
        topk_weights=_stack(
            [r.gate.selection.topk_weights_TK for r in records], np.float32, num_rows
        ),
        margins=_margins(records, num_rows),
        formats=_formats(records, topk_ids.shape),
        units=step.precision.layers if step.precision is not None else (),
        decisions=tuple(_decisions(spans, drawn, step, gates, phy_ids, number_format)),
    )


def _stack(columns: list[torch.Tensor], dtype: type[np.generic], num_rows: int) -> Any:
    """Stack L tensors (T, K) to a (T, L, K) array in host memory; a dense model's is (T, 0, 0)."""
    width = columns[0].shape[1] if columns else 0
    stacked = np.empty((num_rows, len(columns), width), dtype)
    for layer, column in enumerate(columns):
        stacked[:, layer] = column.cpu().numpy()
    return stacked


def _formats(records: list[LayerRecord], shape: tuple[int, ...]) -> UInt8:
    """Return (T, L, K) format and reason of each row in each expert; none where all are alike."""
    if not records or records[0].units is None:
        return no_formats()
    codes = np.zeros(shape, np.uint8)
    for layer, record in enumerate(records):
        assert record.units is not None, "formats are routed in all layers of a step or in none"
        codes[:, layer] = record.units.codes(shape[2])
    return codes


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


def _decisions(
    spans: Sequence[Span],
    drawn: Sequence[int],
    step: StepContext,
    gates: Mapping[int, Gate],
    phy_ids: Any,
    number_format: str,
) -> Iterator[Decision]:
    """Copy the whole decision of every watched token, layer by layer."""
    assert step.records is not None, "the step ran without records"
    if not any(span.watched for span in spans):
        return
    how = [
        _circumstances(step, place, layer, gate, number_format)
        for place, (layer, gate) in enumerate(gates.items())
    ]
    first_row = first_drawn = 0
    for span in spans:
        kept = _num_kept(span, drawn[first_drawn:])
        first_drawn += span.num_drafts + 1 if span.draw else 0
        for position in span.watched:
            offset = position - span.start
            row, token = first_row + offset, span.token_ids[offset]
            key = RowKey(row, span.request_id, position, token, span.home)
            ahead = offset - (len(span.token_ids) - span.num_drafts)
            for place, record in enumerate(step.records):
                told = _with_format(how[place], record, row)
                if ahead >= 0:
                    verdict = "accepted" if ahead < kept else "rejected"
                    told = replace(told, model="draft", verdict=verdict)
                yield decision_of(key, place, record.gate, phy_ids[:, place], step.table, told)
        first_row += len(span.token_ids)


def _num_kept(span: Span, drawn: Sequence[int]) -> int:
    """Return how many of a span's drafts the target drew as well."""
    if not span.num_drafts:
        return 0
    proposed = span.token_ids[-span.num_drafts :]
    return num_kept(proposed, drawn[: span.num_drafts + 1]) - 1


def _circumstances(
    step: StepContext, place: int, layer: int, gate: Gate, number_format: str
) -> Circumstances:
    """Gather what else bore on one layer's choice: all of it was noted while the step ran."""
    assert step.records is not None, "the step ran without records"
    record, policy = step.records[place], step.policies[place]
    bias_E: Tensor | None = gate.logit_bias
    if policy is not None:
        bias_E = policy.bias_E if bias_E is None else bias_E + policy.bias_E
    return Circumstances(
        layer=layer,
        source=sources(),
        number_format=number_format,
        bias_E=bias_E,
        bonus_TE=record.bonus_TE,
        why_TK=record.why_TK,
        capacity=step.capacity.rows[place] if step.capacity else -1,
        looked_up=record.looked_up,
        stage_ms=step.clock.between(*record.spans),
    )


def _with_format(how: Circumstances, record: LayerRecord, row: int) -> Circumstances:
    """Add what one row's units got; nothing where all rows have the engine's own format."""
    if record.units is None:
        return how
    unit, number_format, reason = record.units.told(row, how.number_format)
    *before, experts, combined = how.source
    return replace(
        how,
        unit=unit,
        number_format=number_format,
        format_reason=reason,
        source=(*before, _line_of(PrecisionStep.units), experts, combined),
    )


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
    return tuple(map(_line_of, stages))


@functools.cache
def _line_of(stage: Callable[..., Any]) -> str:
    """Return `engine/…py:line` of a function."""
    path = Path(inspect.getfile(stage)).relative_to(Path(__file__).parents[2]).as_posix()
    return f"{path}:{inspect.getsourcelines(stage)[1]}"
