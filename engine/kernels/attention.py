"""Attention over a paged KV cache, for prefill chunks and for a batch of decodes.

`AttentionPlan` is made once a step and shared by all layers. Called by `engine.model.attention`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of one sequence in a step's batch."""

    first_row: int
    num_rows: int
    start: int
    """Position of the first row in its sequence."""
    blocks: tuple[int, ...]
    """The sequence's blocks, enough for start + num_rows tokens."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Which rows attend to which blocks in one step."""

    prefills: tuple[Segment, ...]
    decodes: tuple[Segment, ...]
    """Segments of one row each."""
    block_size: int
    decode_rows_B: Tensor
    """(B,) int64 rows of the decodes."""
    decode_blocks_BM: Tensor
    """(B, M) int64 their block tables, padded with block 0."""
    decode_mask_BS: Tensor
    """(B, 1, 1, S) bool, S = M · block_size: which cached positions a decode sees."""


def plan_attention(segments: list[Segment], block_size: int, device: torch.device) -> AttentionPlan:
    """Split a step's segments into prefills and decodes and lay out the decodes' block tables."""
    decodes = tuple(segment for segment in segments if segment.num_rows == 1)
    longest = max((len(segment.blocks) for segment in decodes), default=0)
    tables = [segment.blocks + (0,) * (longest - len(segment.blocks)) for segment in decodes]
    lengths_B = torch.tensor([segment.start + 1 for segment in decodes], device=device)
    seen_BS = torch.arange(longest * block_size, device=device) < lengths_B.unsqueeze(1)
    return AttentionPlan(
        prefills=tuple(segment for segment in segments if segment.num_rows > 1),
        decodes=decodes,
        block_size=block_size,
        decode_rows_B=torch.tensor([segment.first_row for segment in decodes], device=device),
        decode_blocks_BM=torch.tensor(tables, dtype=torch.int64, device=device),
        decode_mask_BS=seen_BS[:, None, None, :],
    )


def paged_attention(q_THd: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan) -> Tensor:
    """Attend each row to its sequence's cached positions up to its own.

    Args:
        q_THd: (T, H, hd) queries, already normed and rotated.
        keys: (blocks, block_size, Hkv, hd), the cache of one layer with this step's rows already
            written; block 0 is never written.
        values: like `keys`.
        plan: what each row sees.

    Returns:
        (T, H, hd).
    """
    out_THd = torch.empty_like(q_THd)
    grouped = q_THd.shape[1] != keys.shape[2]
    for segment in plan.prefills:
        rows = slice(segment.first_row, segment.first_row + segment.num_rows)
        length = segment.start + segment.num_rows
        blocks = torch.tensor(segment.blocks, device=keys.device)
        positions = torch.arange(segment.start, length, device=keys.device)
        mask = torch.arange(length, device=keys.device) <= positions.unsqueeze(1)
        k, v = (_gather(cache, blocks)[None, :, :length] for cache in (keys, values))
        q = q_THd[rows].transpose(0, 1)[None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
        out_THd[rows] = out[0].transpose(0, 1)
    if plan.decodes:
        batch, width = plan.decode_blocks_BM.shape
        flat = plan.decode_blocks_BM.view(-1)
        k, v = (
            cache.index_select(0, flat)
            .view(batch, width * plan.block_size, *cache.shape[2:])
            .transpose(1, 2)
            for cache in (keys, values)
        )
        q = q_THd.index_select(0, plan.decode_rows_B).unsqueeze(2)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=plan.decode_mask_BS, enable_gqa=grouped
        )
        out_THd[plan.decode_rows_B] = out.squeeze(2)
    return out_THd


def _gather(cache: Tensor, blocks: Tensor) -> Tensor:
    """Return one sequence's cache as (Hkv, positions, hd)."""
    return cache.index_select(0, blocks).flatten(0, 1).transpose(0, 1)
