"""Random layers and batches: weights once, several batches to rotate over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workbench.bench.gpu.shapes import Shape

if TYPE_CHECKING:
    from engine.kernels.quant import QuantisedExperts

E4M3_SPREAD = 64.0
"""Standard deviation of random e4m3 values, of 448 at most."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What a layer is given."""

    x_TD: Tensor
    ids_TK: Tensor
    """(T, K) int64."""
    weights_TK: Tensor
    """(T, K) fp32, each row sums to one."""


def native_weights(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return random gate_up (E, 2F, D) and down (E, D, F), scaled to keep the rows' scale."""
    generator = torch.Generator(device).manual_seed(0)
    gate_up = torch.empty(
        shape.num_experts, 2 * shape.width, shape.hidden, device=device, dtype=dtype
    )
    down = torch.empty(shape.num_experts, shape.hidden, shape.width, device=device, dtype=dtype)
    for stack in (gate_up, down):
        for expert in stack:
            expert.normal_(0, expert.shape[-1] ** -0.5, generator=generator)
    return gate_up, down


def e4m3_weights(shape: Shape, device: torch.device) -> QuantisedExperts:
    """Return random e4m3 weights with a scale for each output channel, made expert by expert."""
    from engine.kernels.quant import QuantisedExperts, QuantisedWeights

    generator = torch.Generator(device).manual_seed(0)

    def stack(outputs: int, inputs: int) -> QuantisedWeights:
        sizes = (shape.num_experts, outputs, inputs)
        values = torch.empty(sizes, device=device, dtype=torch.float8_e4m3fn)
        for expert in values:
            wide = torch.empty(outputs, inputs, device=device, dtype=torch.bfloat16)
            wide.normal_(0, E4M3_SPREAD, generator=generator).clamp_(-448, 448)
            expert.copy_(wide.to(torch.float8_e4m3fn))
        spread = torch.rand(sizes[:2], device=device, generator=generator) + 0.5
        return QuantisedWeights(values, spread * inputs**-0.5 / E4M3_SPREAD)

    return QuantisedExperts(stack(2 * shape.width, shape.hidden), stack(shape.hidden, shape.width))


def widened(quantised: QuantisedExperts, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return what one-byte weights stand for, expert by expert so that fp32 copies stay small."""
    stacks = []
    for one in (quantised.gate_up, quantised.down):
        wide = torch.empty(one.values.shape, device=one.values.device, dtype=dtype)
        for expert, values, scales in zip(wide, one.values, one.scales, strict=True):
            expert.copy_(values.float() * scales.unsqueeze(1))
        stacks.append(wide)
    return stacks[0], stacks[1]


def batch(
    shape: Shape,
    tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    load: str = "uniform",
) -> Batch:
    """Return a random batch.

    Args:
        shape: the layer.
        tokens: T.
        device: where to.
        dtype: of the tokens.
        seed: another one gives other tokens and other experts.
        load: `uniform`; `skewed`, expert i about 1 / (i + 1) as often; `one`, the first choice of
            every token is the last expert; `gaps`, every third id is -1.
    """
    generator = torch.Generator(device).manual_seed(1000 + seed)
    x_TD = torch.randn(tokens, shape.hidden, device=device, generator=generator).to(dtype)
    noise = torch.rand(tokens, shape.num_experts, device=device, generator=generator)
    if load == "skewed":
        noise = noise ** torch.arange(1, shape.num_experts + 1, device=device)
    elif load == "one":
        noise[:, -1] = 2.0
    ids_TK = noise.topk(shape.top_k).indices
    if load == "gaps":
        flat = ids_TK.view(-1)
        flat[::3] = -1
    weights_TK = torch.rand(tokens, shape.top_k, device=device, generator=generator) + 0.1
    return Batch(x_TD, ids_TK, weights_TK / weights_TK.sum(-1, keepdim=True))
