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


def permutation(
    ids_TK: Tensor, num_experts: int, block_rows: int, format_rows: int
) -> tuple[list[int], list[int], list[tuple[int, int, int]]]:
    """Order pairs by expert, one after the other.

    Returns the token of each row, the row of each pair (the number of rows for an id of -1), and
    the expert, first row and first format unit of each block.
    """
    ids = ids_TK.flatten().tolist()
    num_rows = sum(expert >= 0 for expert in ids)
    tokens: list[int] = []
    row_of = [num_rows] * len(ids)
    blocks: list[tuple[int, int, int]] = []
    unit = 0
    for expert in range(num_experts):
        first = len(tokens)
        for pair, chosen in enumerate(ids):
            if chosen == expert:
                row_of[pair] = len(tokens)
                tokens.append(pair // ids_TK.shape[1])
        for row in range(first, len(tokens)):
            if (row - first) % block_rows == 0:
                blocks.append((expert, row, unit))
            if (row - first + 1) % format_rows == 0 or row == len(tokens) - 1:
                unit += 1
    return tokens, row_of, blocks


def quantised(x: Tensor, name: str) -> Tensor:
    """Return what is left of x, fp64, when each vector of the last dimension is put on a grid.

    int8: 255 equal steps up to the vector's largest magnitude. e4m3: the format's own numbers, of
    which the largest, 448, stands for the largest magnitude.
    """
    wide = x.double()
    if name == "int8":
        grid = torch.arange(-127, 128, dtype=torch.float64)
    else:
        codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
        values = codes.view(torch.float8_e4m3fn).double()
        grid = torch.unique(values[torch.isfinite(values)])
    peak = wide.abs().amax(-1, keepdim=True)
    scale = torch.where(peak > 0, peak / grid.max(), torch.ones_like(peak))
    place = torch.bucketize(wide / scale, (grid[1:] + grid[:-1]) / 2)
    return grid[place] * scale


def moe_by_format(
    x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, gate_up: Tensor, down: Tensor,
    formats_TK: Sequence[Sequence[str | None]],
) -> Tensor:  # fmt: skip
    """Return (T, D) fp64: like `moe`, each pair in its format (`int8`, `e4m3`) or, None, as it is.

    The inner vector is rounded to the tokens' format before it is put on a grid, as it is stored.
    """
    y_TD = torch.zeros(x_TD.shape, dtype=torch.float64)
    stacks: dict[str | None, tuple[Tensor, Tensor]] = {None: (gate_up.double(), down.double())}
    for kind in {kind for row in formats_TK for kind in row if kind is not None}:
        stacks[kind] = quantised(gate_up, kind), quantised(down, kind)
    for token, (ids, weights) in enumerate(zip(ids_TK.tolist(), weights_TK.tolist(), strict=True)):
        for expert, weight, name in zip(ids, weights, formats_TK[token], strict=True):
            if expert < 0:
                continue
            x_D, (first, second) = x_TD[token].double(), stacks[name]
            gate, up = (first[expert] @ (quantised(x_D, name) if name else x_D)).chunk(2)
            inner = (gate / (1 + torch.exp(-gate)) * up).to(x_TD.dtype).double()
            y_TD[token] += weight * (second[expert] @ (quantised(inner, name) if name else inner))
    return y_TD
