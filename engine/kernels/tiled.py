"""The deterministic twins: every operation on tiles of exactly 16 rows.

On a CPU the bits of a row of a product change with the number of rows beside it, with the number of
threads, between prefill and decode, and in the scalar tail of a vectorised function. Here each
operation always sees the same shapes, zero-padded, so a row's bits depend on that row alone. Runs
in fp32 with one thread, which the engine sets.

It costs several times the speed (README, Numbers); the paths in `dense`, `topk`, `grouped_gemm`
and `attention` are the fast ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import checks
from engine.kernels.attention import AttentionPlan, Segment
from engine.kernels.experts import ExpertWeights
from engine.kernels.router import RouterConfig
from engine.kernels.topk import Selection, check_logits, clean, joined, select

TILE_ROWS = 16
TILE_KEYS = 64


def linear(x_TD: Tensor, weight_OD: Tensor) -> Tensor:
    """Return ``x @ weight.T`` as `dense.linear` does, tile by tile."""
    return _by_tiles(lambda tile: F.linear(tile, weight_OD), x_TD)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension as `dense.rms_norm` does, tile by tile."""
    rows = x.reshape(-1, x.shape[-1])
    return _by_tiles(lambda t: F.rms_norm(t, weight_D.shape, weight_D, eps), rows).view_as(x)


def norm_and_rotate(
    qk_THd: Tensor,
    num_queries: int,
    q_weight_d: Tensor,
    k_weight_d: Tensor,
    eps: float,
    rotary: tuple[Tensor, Tensor],
) -> Tensor:
    """Norm and rotate as `dense.norm_and_rotate` does, products and sums rounded one by one."""
    half = qk_THd.shape[-1] // 2
    cos, sin = rotary[0][..., half:], rotary[1][..., half:]
    q_THd = rms_norm(qk_THd[:, :num_queries], q_weight_d, eps)
    k_THd = rms_norm(qk_THd[:, num_queries:], k_weight_d, eps)
    parts = []
    for x_THd in (q_THd, k_THd):
        first, second = x_THd.chunk(2, dim=-1)
        parts.append(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
    return torch.cat(parts, dim=1)


def topk(
    logits_TE: Tensor,
    router: RouterConfig,
    *,
    logit_bias_E: Tensor | None = None,
    selection_bias_E: Tensor | None = None,
    preferred_E: Tensor | None = None,
    banned_E: Tensor | None = None,
    explain: bool = True,
) -> Selection:
    """Choose experts as `topk.route` does, tile by tile."""
    check_logits(logits_TE, router, logit_bias_E, selection_bias_E, preferred_E, banned_E)
    clean_TE, lift_E, bad_rows = clean(logits_TE, logit_bias_E, selection_bias_E)
    parts = [
        select(tile, router, lift_E, preferred_E, banned_E, explain)
        for tile in _tiles(clean_TE) or (clean_TE,)
    ]
    return joined(parts, slice(logits_TE.shape[0]))._replace(bad_rows=bad_rows)


def mlp(x_TD: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Run a dense SwiGLU as `grouped_gemm.mlp` does, tile by tile."""

    def swiglu(tile: Tensor) -> Tensor:
        gate, up = F.linear(tile, gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate.contiguous()) * up, down)

    return _by_tiles(swiglu, x_TD)


def grouped_mlp(
    rows_RD: Tensor, counts: Sequence[int], experts: Sequence[int], weights: ExpertWeights
) -> Tensor:
    """Run each group through its expert as `grouped_gemm.grouped_mlp` does, tile by tile."""
    checks.groups(rows_RD, counts, experts, weights.gate_up)
    out_RD = torch.empty_like(rows_RD)
    start = 0
    for count, expert in zip(counts, experts, strict=True):
        rows = slice(start, start + count)
        out_RD[rows] = mlp(rows_RD[rows], weights.gate_up[expert], weights.down[expert])
        start += count
    return out_RD


def paged_attention(q_THd: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan) -> Tensor:
    """Attend as `attention.paged_attention` does, in 16 x 64 tiles with online softmax.

    Source: the running maximum and sum are those of FlashAttention (arXiv 2205.14135, algorithm 1).
    """
    out_THd = torch.empty_like(q_THd)
    for segment in plan.prefills + plan.decodes:
        k = _key_tiles(keys, segment, q_THd.shape[1]).transpose(2, 3).contiguous()
        v = _key_tiles(values, segment, q_THd.shape[1]).contiguous()
        for offset in range(0, segment.num_rows, TILE_ROWS):
            count = min(TILE_ROWS, segment.num_rows - offset)
            first = segment.first_row + offset
            out_THd[first : first + count] = _attend_tile(
                q_THd[first : first + count], k, v, segment.start + offset
            )
    return out_THd


def _attend_tile(q_rHd: Tensor, k_NHdS: Tensor, v_NHSd: Tensor, start: int) -> Tensor:
    """Attend up to 16 rows of one sequence, the first at position `start`, to its key tiles."""
    count, num_heads, head_dim = q_rHd.shape
    q = q_rHd.new_zeros(num_heads, TILE_ROWS, head_dim)
    q[:, :count] = q_rHd.transpose(0, 1)
    positions = torch.arange(start, start + TILE_ROWS).unsqueeze(1)
    best = q.new_full((num_heads, TILE_ROWS, 1), float("-inf"))
    total = q.new_zeros(num_heads, TILE_ROWS, 1)
    acc = torch.zeros_like(q)
    num_tiles = (start + count - 1) // TILE_KEYS + 1
    for index in range(num_tiles):
        scores = torch.bmm(q, k_NHdS[index]) * head_dim**-0.5
        seen = torch.arange(index * TILE_KEYS, (index + 1) * TILE_KEYS) <= positions
        scores = scores.masked_fill(~seen, float("-inf"))
        new_best = torch.maximum(best, scores.amax(-1, keepdim=True))
        shrink, weights = torch.exp(best - new_best), torch.exp(scores - new_best)
        total = total * shrink + weights.sum(-1, keepdim=True)
        acc = acc * shrink + torch.bmm(weights, v_NHSd[index])
        best = new_best
    return (acc / total)[:, :count].transpose(0, 1)


def _key_tiles(cache: Tensor, segment: Segment, num_heads: int) -> Tensor:
    """Lay one sequence's cache out as (tiles, H, 64, hd), zero past its last block."""
    sequence = cache[list(segment.blocks)].flatten(0, 1)
    padded = F.pad(sequence, (0, 0, 0, 0, 0, -sequence.shape[0] % TILE_KEYS))
    heads = padded.repeat_interleave(num_heads // cache.shape[2], dim=1)
    return heads.view(-1, TILE_KEYS, num_heads, cache.shape[3]).transpose(1, 2)


def _by_tiles(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a row-wise function to zero-padded tiles of 16 rows and drop the padding."""
    parts = [fn(tile) for tile in _tiles(x)]
    return torch.cat(parts)[: x.shape[0]] if parts else fn(x)


def _tiles(x: Tensor) -> Sequence[Tensor]:
    """Split (T, …) into contiguous tiles of exactly 16 rows; no tile for T = 0."""
    if x.shape[0] == 0:
        return ()
    padding = x.new_zeros(-x.shape[0] % TILE_ROWS, *x.shape[1:])
    return torch.split(torch.cat((x, padding)), TILE_ROWS)
