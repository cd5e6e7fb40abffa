"""The smallest token router: a gate and a map from experts to devices.

The prototype from which the guide starts, as a module to play with in a notebook. The engine's own
layer, with replicas, policies and records, is `engine.model.moe`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.errors import ConfigError
from engine.kernels.router import RouterConfig
from engine.kernels.topk import route


class TokenRouter(nn.Module):
    """Chooses experts, weights and devices for each token.

    `expert_to_device` is a buffer, so it moves with the module and may be swapped between calls.
    """

    expert_to_device: Tensor

    def __init__(
        self, hidden_dim: int, num_experts: int, top_k: int, expert_to_device: Sequence[int]
    ) -> None:
        """Make a router with random gate weights.

        Args:
            hidden_dim: D.
            num_experts: E.
            top_k: K, 1 to E.
            expert_to_device: for each expert the device it lives on; E entries of 0 or more.

        Raises:
            ConfigError: K or the map does not fit E.
        """
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ConfigError(
                f"top_k ({top_k}) must lie between 1 and num_experts ({num_experts})."
            )
        if len(expert_to_device) != num_experts or min(expert_to_device) < 0:
            raise ConfigError(
                f"expert_to_device ({list(expert_to_device)}) must give each of the {num_experts} "
                "experts a device of 0 or more."
            )
        self.gate = nn.Linear(hidden_dim, num_experts, bias=False)
        self.router = RouterConfig.softmax(top_k, renormalise=True)
        self.register_buffer("expert_to_device", torch.tensor(expert_to_device))

    def forward(self, hidden_states_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Route T tokens.

        Args:
            hidden_states_TD: (T, D).

        Returns:
            ids (T, K) int64, best first; weights (T, K) fp32, each row summing to 1; devices (T, K)
            int64.
        """
        logits_TE = self.gate(hidden_states_TD).float()
        chosen = route(logits_TE, self.router, explain=False)
        devices_TK = self.expert_to_device[chosen.topk_ids_TK]
        return chosen.topk_ids_TK, chosen.topk_weights_TK, devices_TK
