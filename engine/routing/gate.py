"""Level 1: which experts a token uses.

The gate's product is computed anyway, so this level is decided in real time. The gate stays in fp32
whatever the model's number format.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.config import ModelConfig
from engine.faults import Faults
from engine.kernels.registry import Ops
from engine.kernels.topk import Selection
from engine.routing.policy import LayerPolicy


class GateOutput(NamedTuple):
    """One layer's choice for T tokens."""

    logits_TE: Tensor
    """(T, E) fp32 the product, before policy."""
    selection: Selection


class Gate(nn.Module):
    """Router of one layer: logits by one product, experts by softmax and top-k."""

    def __init__(self, config: ModelConfig, ops: Ops, faults: Faults) -> None:
        super().__init__()
        shape = (config.num_experts, config.hidden_size)
        self.weight = nn.Parameter(torch.full(shape, torch.nan), requires_grad=False)
        self.topk = partial(
            ops.topk,
            k=config.top_k,
            renormalise=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
        )
        self.ops, self.faults = ops, faults

    def logits(self, x_TD: Tensor) -> Tensor:
        """Return the (T, E) fp32 logits of hidden states in any format."""
        logits_TE: Tensor = self.ops.linear(x_TD.float(), self.weight)
        if (fault := self.faults.gate_logits) is not None:
            logits_TE = fault(logits_TE)
        return logits_TE

    def select(self, logits_TE: Tensor, policy: LayerPolicy | None) -> Selection:
        """Choose experts from logits, under an operator's policy if one is set."""
        if (fault := self.faults.gate_lock) is not None:
            fault(None)
        if policy is not None:
            return policy.select(self.topk, logits_TE)
        selection: Selection = self.topk(logits_TE)
        return selection
