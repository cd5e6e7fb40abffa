"""The Mixture-of-Experts layer: a token's way from gate to sum, in seven lines.

Shapes: T tokens, D model width, F expert width, E logical experts, P physical experts, K experts
per token, R = T·K rows ordered by expert.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from engine.config import ModelConfig
from engine.exchange.dispatch import DispatchHandle
from engine.kernels.experts import ExpertWeights
from engine.kernels.topk import Selection
from engine.model.layers import blank
from engine.model.parts import Parts
from engine.model.step import LayerRecord, StepContext
from engine.routing.device import Placer
from engine.routing.gate import Gate, GateOutput
from engine.routing.precision import Units


class MoE(nn.Module):
    """One layer of experts behind a gate.

    The dispatcher decides in how many flights the rows travel; with more than one, a flight is
    under way while the rows of the one before compute.
    """

    def __init__(self, config: ModelConfig, index: int, parts: Parts) -> None:
        """Build the layer that is number `index` among the MoE layers."""
        super().__init__()
        self.index = index
        self.gate = Gate(config, parts.ops, parts.faults)
        self.placer = Placer()
        self.dispatcher, self.faults = parts.dispatcher, parts.faults
        self.experts = Experts(config, parts)

    def forward(self, x_TD: Tensor, step: StepContext) -> Tensor:
        """Send each token to its experts and add up what they return; (T, D) in and out."""
        mark, table, layer = step.clock.mark, step.table, self.index
        first_span = step.clock.num_kept
        logits_TE = self.gate.logits(x_TD)
        mark("gate")
        chosen, bonus_TE = self._select(logits_TE, step)
        mark("select")
        phy_ids_TK = self.placer.place(chosen.topk_ids_TK, step.homes_T, table, layer)
        if step.capacity is not None:
            phy_ids_TK = step.capacity.limit(chosen, phy_ids_TK, layer, self.faults.gate_capacity)
        mark("place")
        flights = self.dispatcher.dispatch(x_TD, phy_ids_TK, table, layer, mark)
        returns = []
        for flight in flights:
            rows_RD, handle = flight.arrive()
            mark("transfer")
            out_RD, units = self._run(rows_RD, handle, x_TD, step)
            mark("experts")
            weights_TK = chosen.topk_weights_TK[flight.part]
            returns.append(self.dispatcher.combine(out_RD, weights_TK, handle, table))
        parts = [result.arrive() for result in returns]
        y_TD = parts[0] if len(parts) == 1 else torch.cat(parts)
        mark("combine")
        if step.precision is not None:
            step.precision.observe(layer, logits_TE, x_TD, phy_ids_TK.shape[1])
            mark("format")
        step.bad_rows += int(chosen.bad_rows)
        if step.records is not None:
            record = LayerRecord(GateOutput(logits_TE, chosen), phy_ids_TK, units=units)
            step.records.append(self._explained(record, bonus_TE, first_span, step))
        return y_TD

    def _run(
        self, rows_RD: Tensor, handle: DispatchHandle, x_TD: Tensor, step: StepContext
    ) -> tuple[Tensor, Units | None]:
        """Run the rows, each in the number format of its unit; failed units once more."""
        if (precision := step.precision) is None:
            return self.experts(rows_RD, handle), None
        units = precision.units(self.index, handle.counts, handle.row_of_N)
        step.clock.mark("format")
        out_RD = self.experts(rows_RD, handle, units.formats)
        step.clock.mark("experts")
        run = partial(self.experts, rows_RD, handle)
        failed_U = precision.check(self.index, units, out_RD, x_TD, run)
        step.clock.mark("format")
        return precision.repaired(self.index, units, out_RD, failed_U, run), units

    def _select(self, logits_TE: Tensor, step: StepContext) -> tuple[Selection, Tensor | None]:
        policy, explain = step.policies[self.index], step.records is not None
        if (smoother := step.smoother) is None:
            return self.gate.select(logits_TE, policy, explain=explain), None
        return smoother.select(
            partial(self.gate.select, policy=policy, explain=explain), logits_TE, self.index
        )

    def _explained(
        self, record: LayerRecord, bonus_TE: Tensor | None, first_span: int, step: StepContext
    ) -> LayerRecord:
        """Note beside the choice how it came about; nothing here is worked out."""
        found = (("place", self.placer.found), ("sort", self.dispatcher.order.found))
        record.looked_up = tuple(stage for stage, was in found if was)
        record.why_TK, record.bonus_TE = self.placer.last.why_TK, bonus_TE
        record.spans = (first_span, step.clock.num_kept)
        return record


class Experts(nn.Module):
    """The feed-forward networks of one layer, stacked: all E logical ones, or a rank's slots."""

    def __init__(self, config: ModelConfig, parts: Parts) -> None:
        super().__init__()
        num_experts = config.num_experts if parts.num_slots is None else parts.num_slots
        width = config.hidden_size
        self.gate_up = blank(num_experts, 2 * config.moe_intermediate_size, width)
        self.down = blank(num_experts, width, config.moe_intermediate_size)
        self.ops, self.faults = parts.ops, parts.faults
        self.weights = ExpertWeights(self.gate_up, self.down, self.ops.prepare_experts)

    def forward(
        self, rows_RD: Tensor, handle: DispatchHandle, formats_R: Tensor | None = None
    ) -> Tensor:
        """Run (R, D) rows, ordered by physical expert, through their experts."""
        mixed = () if formats_R is None else (formats_R,)
        out_RD: Tensor = self.ops.grouped_mlp(
            rows_RD, handle.counts, handle.experts, self.weights, *mixed
        )
        if (fault := self.faults.experts_compute) is not None:
            out_RD = fault(out_RD)
        return out_RD

    def others(self, gate_up: Tensor, down: Tensor) -> ExpertWeights:
        """Make all the state of other experts, (S, 2F, D) and (S, D, F), for `replace`."""
        weights = ExpertWeights(gate_up, down, self.ops.prepare_experts)
        weights.refresh()
        if (fault := self.faults.experts_prepare) is not None:
            gate_up, down = fault((gate_up, down))
            made = ExpertWeights(gate_up, down, self.ops.prepare_experts)
            made.refresh()
            weights.prepared = made.prepared
        return weights

    def replace(self, weights: ExpertWeights) -> None:
        """Hold these experts from the next step on."""
        self.weights = weights
        self.gate_up = nn.Parameter(weights.gate_up, requires_grad=False)
        self.down = nn.Parameter(weights.down, requires_grad=False)
