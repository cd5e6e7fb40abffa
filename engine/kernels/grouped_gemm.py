"""The experts' feed-forward over rows that are already ordered by expert, as plainly as it runs.

The routing weight is not applied here: it stays with combine. The faster paths of a CPU are in
`cpu_experts`, those of a GPU in `gpu.grouped_gemm`. Called by `engine.model.moe`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import checks
from engine.kernels.experts import ExpertWeights


def grouped_mlp(
    rows_RD: Tensor, counts: Sequence[int], experts: Sequence[int], weights: ExpertWeights
) -> Tensor:
    """Run every group of rows through its expert's SwiGLU: ``down(silu(gate) * up)``.

    Args:
        rows_RD: (R, D) rows ordered by group, in the weights' format; R may be 0.
        counts: rows of each group; they sum to R. Groups without rows launch nothing.
        experts: for each group the index of its weights, 0 to E - 1, so that two replicas of one
            expert share them.
        weights: of all E experts.

    Returns:
        (R, D) in the format of `rows_RD`.

    Raises:
        KernelError: rows, counts, experts and weights do not fit one another.
    """
    checks.groups(rows_RD, counts, experts, weights.gate_up)
    out_RD = torch.empty_like(rows_RD)
    start = 0
    for count, expert in zip(counts, experts, strict=True):
        if count == 0:
            continue
        end = start + count
        out_RD[start:end] = mlp(rows_RD[start:end], weights.gate_up[expert], weights.down[expert])
        start = end
    return out_RD


def mlp(x_TD: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Run a dense SwiGLU: `gate_up` (2F, D), `down` (D, F)."""
    gate, up = F.linear(x_TD, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)
