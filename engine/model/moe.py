"""The Mixture-of-Experts layer: a token's way from gate to sum, in seven lines.

Shapes: T tokens, D model width, F expert width, E logical experts, P physical experts, K experts
per token, R = T·K rows ordered by expert.
"""

from __future__ import annotations

from torch import Tensor, nn

from engine.config import ModelConfig
from engine.exchange.dispatch import DispatchHandle, LocalDispatcher
from engine.faults import Faults
from engine.kernels.experts import ExpertWeights
from engine.kernels.registry import Ops
from engine.kernels.topk import Selection
from engine.model.layers import blank
from engine.model.step import LayerRecord, StepContext
from engine.routing.device import Placer
from engine.routing.gate import Gate, GateOutput


class MoE(nn.Module):
    """One layer of experts behind a gate.

    Waits for its own exchange; nothing overlaps.
    """

    def __init__(self, config: ModelConfig, index: int, ops: Ops, faults: Faults) -> None:
        """Build the layer that is number `index` among the MoE layers."""
        super().__init__()
        self.index = index
        self.gate = Gate(config, ops, faults)
        self.placer = Placer()
        self.dispatcher = LocalDispatcher(ops, faults)
        self.experts = Experts(config, ops, faults)

    def forward(self, x_TD: Tensor, step: StepContext) -> Tensor:
        """Send each token to its experts and add up what they return; (T, D) in and out."""
        mark, table, layer = step.clock.mark, step.table, self.index
        logits_TE = self.gate.logits(x_TD)
        mark("gate")
        chosen = self._select(logits_TE, step)
        mark("select")
        phy_ids_TK = self.placer.place(chosen.topk_ids_TK, step.homes_T, table, layer)
        mark("place")
        rows_RD, handle = self.dispatcher.dispatch(x_TD, phy_ids_TK, table, layer)
        mark("dispatch")
        out_RD = self.experts(rows_RD, handle)
        mark("experts")
        y_TD = self.dispatcher.combine(out_RD, chosen.topk_weights_TK, handle, table)
        mark("combine")
        step.bad_rows += int(chosen.bad_rows)
        if step.records is not None:
            step.records.append(LayerRecord(GateOutput(logits_TE, chosen), phy_ids_TK))
        return y_TD

    def _select(self, logits_TE: Tensor, step: StepContext) -> Selection:
        policy, smoother = step.policies[self.index], step.smoother
        if smoother is None:
            return self.gate.select(logits_TE, policy)
        return smoother.select(
            lambda logits: self.gate.select(logits, policy), logits_TE, self.index
        )


class Experts(nn.Module):
    """The feed-forward networks of one layer, stacked over E logical experts."""

    def __init__(self, config: ModelConfig, ops: Ops, faults: Faults) -> None:
        super().__init__()
        num_experts, width = config.num_experts, config.hidden_size
        self.gate_up = blank(num_experts, 2 * config.moe_intermediate_size, width)
        self.down = blank(num_experts, width, config.moe_intermediate_size)
        self.weights = ExpertWeights(self.gate_up, self.down, ops.prepare_experts)
        self.ops, self.faults = ops, faults

    def forward(self, rows_RD: Tensor, handle: DispatchHandle) -> Tensor:
        """Run (R, D) rows, ordered by physical expert, through their experts."""
        out_RD: Tensor = self.ops.grouped_mlp(rows_RD, handle.counts, handle.experts, self.weights)
        if (fault := self.faults.experts_compute) is not None:
            out_RD = fault(out_RD)
        return out_RD
