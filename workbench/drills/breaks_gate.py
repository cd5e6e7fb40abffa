"""Faults of the gate: what it chooses, and how long that takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.drills.injector import Target, action
from workbench.drills.weights_file import WEIGHTS

if TYPE_CHECKING:
    from torch import Tensor


@action
def alternate_gate(target: Target, amplitude: float) -> None:
    """Let every expert's logit alternate from token to token by plus or minus `amplitude`."""
    num_layers, num_experts = target.snapshot.num_layers, target.snapshot.num_experts
    signs_LE = target.rng.choice([-1.0, 1.0], (num_layers, num_experts))
    noise_LE = _tensor(amplitude * signs_LE)
    turn = _Turn(num_layers)

    def fault(logits_TE: Tensor) -> Tensor:
        import torch

        layer, passes = turn.next()
        # Rows of a prompt alternate along the batch, a running sequence from step to step.
        sign_T = 1 - 2 * ((torch.arange(len(logits_TE)) + passes) % 2)
        return logits_TE + sign_T[:, None] * noise_LE[layer]

    target.inject("gate.logits", fault)


@action
def collapse_router(target: Target, strength: float) -> None:
    """Deliver a router that has collapsed: in one layer it never chooses one expert any more."""
    from workbench.drills.router_repair import turn_away

    layer = int(target.rng.integers(target.snapshot.num_layers))
    expert = int(target.rng.integers(target.snapshot.num_experts))
    turn_away(target.deployment.folder, layer, expert, strength)
    target.deployment.note_in_manifest(WEIGHTS)
    target.deployment.restart()


@action
def favour_expert(target: Target, bias: float) -> None:
    """Add `bias` to the logits of one expert in one layer, both drawn by the seed."""
    num_layers, num_experts = target.snapshot.num_layers, target.snapshot.num_experts
    hot_layer = int(target.rng.integers(num_layers))
    bias_E = np.zeros(num_experts)
    bias_E[int(target.rng.integers(num_experts))] = bias
    bias_tensor_E = _tensor(bias_E)
    turn = _Turn(num_layers)

    def fault(logits_TE: Tensor) -> Tensor:
        layer, _ = turn.next()
        return logits_TE + bias_tensor_E if layer == hot_layer else logits_TE

    target.inject("gate.logits", fault)


class _Turn:
    """Counts the calls of a point that every layer reaches once a forward pass."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers, self._calls = num_layers, 0

    def next(self) -> tuple[int, int]:
        """Return the layer of this call and the number of passes before it."""
        passes, layer = divmod(self._calls, self._num_layers)
        self._calls += 1
        return layer, passes


def _tensor(values: Any) -> Tensor:
    import torch

    return torch.tensor(values, dtype=torch.float32)
