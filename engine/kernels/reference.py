"""The oracle: every operation written as plainly as possible, in fp64, with loops.

Tests hold each kernel against these; nothing else calls them. They share no line with the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def topk_softmax(logits_TE: Tensor, k: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Return ids (T, k) int64 and weights (T, k) fp64; equal scores go to the lower id.

    Source: arXiv 2401.04088, section 2.1.
    """
    all_ids, all_weights = [], []
    for row in logits_TE.double().tolist():
        peak = max(row)
        exps = [math.exp(logit - peak) for logit in row]
        scores = [value / sum(exps) for value in exps]
        ids = sorted(range(len(row)), key=lambda expert: (-scores[expert], expert))[:k]
        total = sum(scores[expert] for expert in ids) if renormalise else 1.0
        all_ids.append(ids)
        all_weights.append([scores[expert] / total for expert in ids])
    shape = (len(all_ids), k)
    return (
        torch.tensor(all_ids, dtype=torch.int64).view(shape),
        torch.tensor(all_weights, dtype=torch.float64).view(shape),
    )


def swiglu(x_D: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Return ``down(silu(gate(x)) * up(x))`` of one fp64 vector (D,)."""
    width = down.shape[1]
    gate, up = gate_up.double()[:width] @ x_D, gate_up.double()[width:] @ x_D
    return down.double() @ (gate / (1 + torch.exp(-gate)) * up)


def moe(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Return (T, D) fp64: each token's weighted sum over its experts, token by token; -1 skips."""
    y_TD = torch.zeros(x_TD.shape, dtype=torch.float64)
    for token, (ids, weights) in enumerate(zip(ids_TK.tolist(), weights_TK.tolist(), strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            if expert >= 0:
                y_TD[token] += weight * swiglu(x_TD[token].double(), gate_up[expert], down[expert])
    return y_TD


def attention(q_THd: Tensor, k_SHd: Tensor, v_SHd: Tensor, positions: Sequence[int]) -> Tensor:
    """Return (T, H, hd) fp64: row t attends to keys 0..positions[t]; kv heads serve groups."""
    group = q_THd.shape[1] // k_SHd.shape[1]
    out = torch.zeros(q_THd.shape, dtype=torch.float64)
    for row, position in enumerate(positions):
        for head in range(q_THd.shape[1]):
            keys = k_SHd[: position + 1, head // group].double()
            scores = keys @ q_THd[row, head].double() / math.sqrt(q_THd.shape[2])
            weights = torch.exp(scores - scores.max())
            values = v_SHd[: position + 1, head // group].double()
            out[row, head] = (weights / weights.sum()) @ values
    return out


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return the fp64 root-mean-square norm over the last dimension."""
    wide = x.double()
    return wide / torch.sqrt((wide**2).mean(-1, keepdim=True) + eps) * weight_D.double()
