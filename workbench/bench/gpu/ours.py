"""This engine's layer on the GPU, prepared for one batch size: permute, experts, combine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workbench.bench.gpu.inputs import Batch, e4m3_weights, native_weights
from workbench.bench.gpu.shapes import Shape

if TYPE_CHECKING:
    from engine.kernels.gpu.experts import ExpertStack
    from engine.kernels.gpu.tiles import TileChoice

Layer = Callable[[Batch], Tensor]


def stack(shape: Shape, device: torch.device, dtype: torch.dtype) -> ExpertStack:
    """Return random experts in the shape's own scheme."""
    from engine.kernels.gpu.experts import ExpertStack

    if shape.scheme == "e4m3":
        return ExpertStack(scheme="e4m3", quantised=e4m3_weights(shape, device))
    gate_up, down = native_weights(shape, device, dtype)
    return ExpertStack(scheme="native", gate_up=gate_up, down=down)


def layer(
    experts: ExpertStack, like: Batch, *, tiles: TileChoice | None = None
) -> tuple[Layer, TileChoice]:
    """Return the layer for batches of this size, and the tiles it takes.

    Memory is allocated here, once, so that a call can be recorded as a CUDA graph.
    """
    from engine.kernels.gpu.combine import combine
    from engine.kernels.gpu.experts import empty_scratch, tiles_for
    from engine.kernels.gpu.grouped_gemm import grouped_mlp
    from engine.kernels.gpu.permute import empty_permutation, permute

    (num_tokens, k), device, dtype = like.ids_TK.shape, like.x_TD.device, like.x_TD.dtype
    num_pairs, num_experts = num_tokens * k, experts.num_experts
    chosen = tiles or tiles_for(experts, dtype, num_pairs, num_experts, device)
    rows = chosen.gate_up.tokens
    blocks = empty_permutation(num_pairs, num_experts, rows, device)
    scratch = empty_scratch(num_tokens, num_pairs, experts, dtype, device)
    y_TD = torch.empty_like(like.x_TD)

    def run(batch: Batch) -> Tensor:
        permutation = permute(batch.ids_TK, num_experts, rows, out=blocks)
        out_ND = grouped_mlp(batch.x_TD, permutation, experts, tiles=chosen, scratch=scratch)
        return combine(
            out_ND,
            batch.weights_TK,
            permutation.row_of_N,
            num_rows=permutation.num_rows,
            out=y_TD,
        )

    return run, chosen
