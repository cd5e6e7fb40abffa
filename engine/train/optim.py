"""Two optimisers side by side: Muon for the matrices, AdamW for everything else.

Muon replaces a matrix' averaged gradient by the nearest matrix whose singular values are all about
one, found by a few Newton-Schulz steps. All matrices of one shape are treated in a single batch.
Source: K. Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
MOMENTUM = 0.95
WEIGHT_DECAY = 0.05
CLIP = 1.0


class Optimiser:
    """Updates a network's parameters; `matrix_rate` and `rate` are the peak learning rates."""

    def __init__(
        self, network: nn.Module, *, matrix_rate: float = 0.02, rate: float = 2e-3
    ) -> None:
        matrices, others = split_parameters(network)
        self.muon = Muon(matrices, rate=matrix_rate)
        wide = [parameter for parameter in others if parameter.dim() > 1]
        vectors = [parameter for parameter in others if parameter.dim() == 1]
        self.adam = torch.optim.AdamW(
            [
                {"params": wide, "weight_decay": WEIGHT_DECAY},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=rate,
            betas=(0.9, 0.95),
            fused=True,
        )
        self.rate = rate
        self.clipped = others

    def step(self, scale: float) -> None:
        """Apply the gradients at `scale` times the peak rates, then drop them."""
        nn.utils.clip_grad_norm_(self.clipped, CLIP)
        for group in self.adam.param_groups:
            group["lr"] = self.rate * scale
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        self.muon.step(scale)

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs."""
        return {"adam": self.adam.state_dict(), "muon": self.muon.momenta}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a saved state."""
        self.adam.load_state_dict(state["adam"])
        for momentum, saved in zip(self.muon.momenta, state["muon"], strict=True):
            momentum.copy_(saved)


class Muon:
    """Momentum, orthogonalised, for parameters whose last two dimensions are a matrix."""

    def __init__(self, parameters: list[nn.Parameter], *, rate: float) -> None:
        self.rate = rate
        shapes = sorted({tuple(parameter.shape[-2:]) for parameter in parameters})
        self.groups = [
            [parameter for parameter in parameters if tuple(parameter.shape[-2:]) == shape]
            for shape in shapes
        ]
        self.momenta = [
            torch.zeros(sum(_count(parameter) for parameter in group), *shape)
            for shape, group in zip(shapes, self.groups, strict=True)
        ]

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Apply and drop the gradients of every group."""
        for group, momentum in zip(self.groups, self.momenta, strict=True):
            rows, columns = momentum.shape[-2:]
            gradient = torch.cat([_stack(_gradient(parameter)) for parameter in group])
            momentum.lerp_(gradient, 1 - MOMENTUM)
            update = orthogonalise(gradient.lerp_(momentum, MOMENTUM))
            rate = self.rate * scale
            update.mul_(-rate * max(1.0, rows / columns) ** 0.5)
            sizes = [_count(parameter) for parameter in group]
            for parameter, part in zip(group, torch.split(update, sizes), strict=True):
                parameter.mul_(1 - rate * WEIGHT_DECAY).add_(part.view_as(parameter))
                parameter.grad = None


def split_parameters(network: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return (matrices for Muon, the rest): embedding, router and norms belong to the rest."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in network.named_parameters():
        hidden = parameter.dim() >= 2 and "embed" not in name and ".gate." not in name
        (matrices if hidden else others).append(parameter)
    return matrices, others


def orthogonalise(gradient: Tensor) -> Tensor:
    """Bring all singular values of each matrix [N, rows, columns] near one; computed in bf16."""
    a, b, c = COEFFICIENTS
    x = gradient.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).float()


def rate_scale(step: int, num_steps: int, warm_up_steps: int) -> float:
    """Return the share of the peak rate: linear warm-up, constant to half, linear decay to 2 %.

    Of 1000 steps with 100 of warm-up: step 49 has 0.5, step 400 has 1.0, step 750 has 0.5.
    """
    if step < warm_up_steps:
        return (step + 1) / warm_up_steps
    return 1.0 if step < decay_start(num_steps) else max(0.02, 2 * (1 - step / num_steps))


def decay_start(num_steps: int) -> int:
    """Return the first step of the decay; up to here a run does not depend on its length."""
    return num_steps // 2


def _count(parameter: nn.Parameter) -> int:
    rows, columns = parameter.shape[-2:]
    return parameter.numel() // (rows * columns)


def _stack(matrices: Tensor) -> Tensor:
    return matrices.reshape(-1, *matrices.shape[-2:])


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "a matrix took no part in the loss"
    return parameter.grad
