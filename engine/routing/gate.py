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
from engine.kernels.router import RouterConfig
from engine.kernels.topk import Selection
from engine.routing.policy import LayerPolicy


class GateOutput(NamedTuple):
    """One layer's choice for T tokens."""

    logits_TE: Tensor
    """(T, E) fp32 the product, before bias and policy."""
    selection: Selection


class Gate(nn.Module):
    """Router of one layer: logits by one product, then the choice that its router describes."""

    def __init__(
        self, config: ModelConfig, ops: Ops, faults: Faults, router: RouterConfig | None = None
    ) -> None:
        """Build the gate of one layer; without `router` it is the one of the model's family.

        The biases that the router asks for are parameters, fp32 (E,), None where it has none.
        """
        super().__init__()
        self.router = router_of(config) if router is None else router
        num_experts = config.num_experts
        self.router.check(num_experts)
        self.weight = _blank(num_experts, config.hidden_size)
        self.logit_bias = _blank(num_experts) if self.router.logit_bias else None
        self.selection_bias = _blank(num_experts) if self.router.selection_bias else None
        self.ops, self.faults = ops, faults

    def logits(self, x_TD: Tensor) -> Tensor:
        """Return the (T, E) fp32 logits of hidden states in any format."""
        logits_TE: Tensor = self.ops.linear(x_TD.float(), self.weight)
        if (fault := self.faults.gate_logits) is not None:
            logits_TE = fault(logits_TE)
        return logits_TE

    def select(
        self, logits_TE: Tensor, policy: LayerPolicy | None, *, explain: bool = True
    ) -> Selection:
        """Choose experts from logits, under an operator's policy if one is set.

        Without `explain` the choice comes without the runner-up and the scores.
        """
        if (fault := self.faults.gate_lock) is not None:
            fault(None)
        if policy is not None:
            return policy.select(partial(self.route, explain=explain), logits_TE)
        return self.route(logits_TE, explain=explain)

    def route(
        self,
        logits_TE: Tensor,
        *,
        preferred_E: Tensor | None = None,
        banned_E: Tensor | None = None,
        explain: bool = True,
    ) -> Selection:
        """Run the operation with this gate's router and biases."""
        selection: Selection = self.ops.topk(
            logits_TE,
            self.router,
            logit_bias_E=self.logit_bias,
            selection_bias_E=self.selection_bias,
            preferred_E=preferred_E,
            banned_E=banned_E,
            explain=explain,
        )
        return selection


def router_of(config: ModelConfig) -> RouterConfig:
    """Return the router of a model of the families the engine loads (Qwen3-MoE)."""
    return RouterConfig.softmax(
        config.top_k, renormalise=config.norm_topk_prob, scale=config.routed_scaling_factor
    )


def _blank(*shape: int) -> nn.Parameter:
    """Make a parameter full of NaN, to be filled from a checkpoint."""
    return nn.Parameter(torch.full(shape, torch.nan), requires_grad=False)
