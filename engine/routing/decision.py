"""The whole record of one token's decision in one layer, copied out of the step that made it.

Nothing here computes: every number is one the step compared.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.events import Decision
from engine.routing.device import Placer
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


def decision_of(
    key: RowKey,
    place: int,
    gate: GateOutput,
    phy_ids_TK: Int,
    table: RoutingTable,
    *,
    layer: int,
    number_format: str,
    source: tuple[str, ...],
) -> Decision:
    """Copy one row of one MoE layer.

    Args:
        key: the row and its token.
        place: index among the MoE layers.
        gate: what the layer's gate put out for all T rows.
        phy_ids_TK: (T, K) physical experts.
        table: the table of the step.
        layer: the model's number of the layer.
        number_format: in which the experts ran the row.
        source: where in the code each stage stands.
    """
    chosen, row = gate.selection, key.row
    assert chosen.ranked_ids_TJ is not None and chosen.ranked_scores_TJ is not None
    assert chosen.scores_TE is not None, "the choice came without its explanation"
    k = chosen.topk_ids_TK.shape[1]
    has_runner_up = chosen.ranked_ids_TJ.shape[1] > k
    ranked = chosen.ranked_scores_TJ[row]
    topk_ids = chosen.topk_ids_TK[row].cpu().numpy()
    physical = phy_ids_TK[row]
    return Decision(
        request_id=key.request_id,
        position=key.position,
        token_id=key.token_id,
        layer=layer,
        logits=gate.logits_TE[row].cpu().numpy().copy(),
        scores=chosen.scores_TE[row].cpu().numpy().copy(),
        topk_ids=topk_ids.astype("int16"),
        topk_weights=chosen.topk_weights_TK[row].cpu().numpy().copy(),
        runner_up=int(chosen.ranked_ids_TJ[row, k]) if has_runner_up else -1,
        margin=float(ranked[k - 1] - ranked[k]) if has_runner_up else float("inf"),
        physical=physical.astype("int16"),
        devices=table.rank_of_phy[physical].astype("int16"),
        reasons=tuple(
            Placer.reason(int(expert), int(phy), key.home, table, place)
            for expert, phy in zip(topk_ids, physical, strict=True)
        ),
        table_version=table.version,
        format=number_format,
        source=source,
    )
