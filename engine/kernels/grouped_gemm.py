"""The experts' feed-forward over rows that are already ordered by expert.

The routing weight is not applied here: it stays with combine. Called by `engine.model.moe`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_mlp(
    rows_RD: Tensor, counts: Sequence[int], experts: Sequence[int], gate_up: Tensor, down: Tensor
) -> Tensor:
    """Run every group of rows through its expert's SwiGLU: ``down(silu(gate) * up)``.

    Args:
        rows_RD: (R, D) rows ordered by group; R may be 0.
        counts: rows of each group; they sum to R. Groups without rows launch nothing.
        experts: for each group the index of its weights in `gate_up` and `down`, so that two
            replicas of one expert share them.
        gate_up: (E, 2F, D), gate rows before up rows.
        down: (E, D, F).

    Returns:
        (R, D) in the format of `rows_RD`.
    """
    out_RD = torch.empty_like(rows_RD)
    start = 0
    for count, expert in zip(counts, experts, strict=True):
        if count == 0:
            continue
        end = start + count
        gate, up = F.linear(rows_RD[start:end], gate_up[expert]).chunk(2, dim=-1)
        out_RD[start:end] = F.linear(F.silu(gate) * up, down[expert])
        start = end
    return out_RD


def mlp(x_TD: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Run a dense SwiGLU: `gate_up` (2F, D), `down` (D, F)."""
    gate, up = F.linear(x_TD, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)
