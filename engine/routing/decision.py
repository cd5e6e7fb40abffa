"""The whole record of one token's decision in one layer, copied out of the step that made it.

Nothing here computes: every number is one the step compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from engine.events import Decision
from engine.routing.device import ONLY, Placer
from engine.routing.gate import GateOutput
from engine.routing.table import Int, RoutingTable


@dataclass(frozen=True, slots=True)
class RowKey:
    """Which token a row of a step belongs to."""

    row: int
    request_id: int
    position: int
    token_id: int
    home: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Circumstances:
    """What else bore on the choice of a layer's rows, as the step noted it."""

    layer: int
    """The model's number of the layer."""
    source: tuple[str, ...]
    """Where in the code each stage stands."""
    number_format: str
    """In which the experts ran the row."""
    format_reason: str = ""
    unit: int = -1
    bias_E: Tensor | None = None
    """(E,) fp32 added to every row's logits; None for nothing."""
    bonus_TE: Tensor | None = None
    """(T, E) fp32 what smoothing added; None while it is off."""
    why_TK: Tensor | None = None
    """(T, K) why each replica was taken; None where every copy is the only one."""
    capacity: int = -1
    looked_up: tuple[str, ...] = ()
    stage_ms: dict[str, float] = field(default_factory=dict)
    model: str = "target"
    verdict: str = ""


def decision_of(
    key: RowKey,
    place: int,
    gate: GateOutput,
    phy_ids_TK: Int,
    table: RoutingTable,
    how: Circumstances,
) -> Decision:
    """Copy one row of one MoE layer.

    Args:
        key: the row and its token.
        place: index among the MoE layers.
        gate: what the layer's gate put out for all T rows.
        phy_ids_TK: (T, K) physical experts, -1 where a slot was dropped.
        table: the table of the step.
        how: what else bore on it.
    """
    chosen, row = gate.selection, key.row
    assert chosen.ranked_ids_TJ is not None and chosen.ranked_scores_TJ is not None
    assert chosen.scores_TE is not None, "the choice came without its explanation"
    k = chosen.topk_ids_TK.shape[1]
    has_runner_up = chosen.ranked_ids_TJ.shape[1] > k
    ranked = chosen.ranked_scores_TJ[row]
    topk_ids = chosen.topk_ids_TK[row].cpu().numpy()
    physical = phy_ids_TK[row]
    devices = np.where(physical >= 0, table.rank_of_phy[physical], -1)
    nothing_E = np.zeros(gate.logits_TE.shape[1], np.float32)
    why_K = np.full(k, ONLY) if how.why_TK is None else how.why_TK[row].cpu().numpy()
    return Decision(
        request_id=key.request_id,
        position=key.position,
        token_id=key.token_id,
        layer=how.layer,
        logits=gate.logits_TE[row].cpu().numpy().copy(),
        scores=chosen.scores_TE[row].cpu().numpy().copy(),
        topk_ids=topk_ids.astype("int16"),
        topk_weights=chosen.topk_weights_TK[row].cpu().numpy().copy(),
        runner_up=int(chosen.ranked_ids_TJ[row, k]) if has_runner_up else -1,
        margin=float(ranked[k - 1] - ranked[k]) if has_runner_up else float("inf"),
        physical=physical.astype("int16"),
        devices=devices.astype("int16"),
        reasons=tuple(
            f"dropped: its expert's {how.capacity} rows were taken by tokens with more weight"
            if device < 0
            else Placer.reason(why, device, key.home, int(table.num_replicas[place, expert]))
            for expert, device, why in zip(
                topk_ids.tolist(), devices.tolist(), why_K.tolist(), strict=True
            )
        ),
        table_version=table.version,
        format=how.number_format,
        source=how.source,
        bias=nothing_E if how.bias_E is None else how.bias_E.cpu().numpy().copy(),
        smoothing=nothing_E if how.bonus_TE is None else how.bonus_TE[row].cpu().numpy().copy(),
        shut=np.zeros(len(nothing_E), np.uint8)
        if chosen.shut_TE is None
        else chosen.shut_TE[row].cpu().numpy().astype(np.uint8),
        capacity=how.capacity,
        unit=how.unit,
        format_reason=how.format_reason,
        model=how.model,
        verdict=how.verdict,
        looked_up=how.looked_up,
        stage_ms=how.stage_ms,
    )
