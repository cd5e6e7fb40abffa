"""Attention over a paged KV cache, for prefill chunks and for a batch of decodes.

`AttentionPlan` is made once a step and shared by all layers. Called by `engine.model.attention`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

FEW_STRANGERS = 2
"""Decodes read the cache in place while it holds at most this many times the blocks they see."""


@dataclass(slots=True)
class Segment:
    """Consecutive rows of one sequence in a step's batch."""

    first_row: int
    num_rows: int
    start: int
    """Position of the first row in its sequence."""
    blocks: tuple[int, ...]
    """The sequence's blocks, enough for start + num_rows tokens."""


@dataclass(frozen=True, slots=True)
class Decodes:
    """B sequences of one new row each, and the U cached blocks they see."""

    rows_B: Tensor
    """(B,) int64 where in the batch their rows are."""
    blocks: slice | Tensor
    """Which blocks of the cache: all up to the last one used, or (U,) int64 if those are many more
    or decodes share some. The first is block 0, which is always zero."""
    owner_U: Tensor
    """(U,) int64 the decode that sees each block; 0 for block 0 and for blocks of nobody here. A
    block that several see stands there as often."""
    table_BM: Tensor
    """(B, M) int64 each decode's blocks as places among the U, padded with 0."""
    place_U: Tensor
    """(U,) int64 the cell of `table_BM`, flattened, that names each block; 0 for none."""
    unseen_BS: Tensor
    """(B, 1, S) bool, S = M · block_size: cached positions that a decode does not see."""
    common: Tensor | None = None
    """(C,) int64 full blocks with which all decodes begin; nothing above counts them. None without
    any."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Which rows attend to which blocks in one step."""

    prefills: tuple[Segment, ...]
    decodes: tuple[Segment, ...]
    """Segments of one row each."""
    together: Decodes | None
    """The decodes laid out to run in one go; None when there are none."""


def plan_attention(segments: list[Segment], block_size: int, device: torch.device) -> AttentionPlan:
    """Split a step's segments into prefills and decodes and lay out the decodes."""
    decodes = tuple(segment for segment in segments if segment.num_rows == 1)
    return AttentionPlan(
        prefills=tuple(segment for segment in segments if segment.num_rows > 1),
        decodes=decodes,
        together=_lay_out(decodes, block_size, device) if decodes else None,
    )


def paged_attention(q_THd: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan) -> Tensor:
    """Attend each row to its sequence's cached positions up to its own.

    Args:
        q_THd: (T, H, hd) queries, already normed and rotated.
        keys: (blocks, block_size, Hkv, hd), the cache of one layer with this step's rows already
            written; block 0 is never written. Fastest if heads come before positions in memory, as
            `engine.model.kv_cache` lays them out.
        values: like `keys`.
        plan: what each row sees.

    Returns:
        (T, H, hd).
    """
    if plan.together is not None and not plan.prefills:
        return _decode(q_THd, keys, values, plan.together)
    out_THd = torch.empty_like(q_THd)
    for segment in plan.prefills:
        rows = slice(segment.first_row, segment.first_row + segment.num_rows)
        out_THd[rows] = _prefill(q_THd[rows], keys, values, segment)
    if plan.together is not None:
        rows_B = plan.together.rows_B
        out_THd[rows_B] = _decode(q_THd.index_select(0, rows_B), keys, values, plan.together)
    return out_THd


def _prefill(q_THd: Tensor, keys: Tensor, values: Tensor, segment: Segment) -> Tensor:
    """Attend the rows of one sequence to a copy of its blocks."""
    length = segment.start + segment.num_rows
    blocks = torch.tensor(segment.blocks, device=keys.device)
    positions = torch.arange(segment.start, length, device=keys.device)
    mask = torch.arange(length, device=keys.device) <= positions.unsqueeze(1)
    k, v = (
        cache.index_select(0, blocks).flatten(0, 1)[None, :length].transpose(1, 2)
        for cache in (keys, values)
    )
    out = F.scaled_dot_product_attention(
        q_THd.transpose(0, 1)[None],
        k,
        v,
        attn_mask=mask,
        enable_gqa=q_THd.shape[1] != keys.shape[2],
    )
    return out[0].transpose(0, 1)


def _decode(q_BHd: Tensor, keys: Tensor, values: Tensor, plan: Decodes) -> Tensor:
    """Attend one row of each sequence, multiplying every block of the cache where it lies.

    Softmax is over a sequence's blocks together; the blocks' sums are added in their order. What a
    block of nobody holds is multiplied too and never looked at. What all sequences begin with is
    read once for all of them.
    """
    batch, num_heads, head_dim = q_BHd.shape
    num_blocks, (width, block_size) = len(plan.owner_U), (plan.table_BM.shape[1], keys.shape[1])
    k_USd, v_USd = (_by_head(cache, plan.blocks) for cache in (keys, values))
    group = num_heads * num_blocks // len(k_USd)
    # 1. Scores of each block against its owner's query.
    q_BHd = q_BHd * head_dim**-0.5
    q_UHd = q_BHd.index_select(0, plan.owner_U)
    scores = torch.bmm(q_UHd.view(-1, group, head_dim), k_USd.transpose(1, 2))
    # 2. Softmax over all blocks of a sequence.
    table = plan.table_BM.view(-1)
    scores = scores.view(num_blocks, num_heads, block_size).index_select(0, table)
    scores = scores.view(batch, width, num_heads, block_size).transpose(1, 2)
    scores = scores.reshape(batch, num_heads, width * block_size)
    scores = scores.masked_fill_(plan.unseen_BS, float("-inf"))
    common_sums = None
    if plan.common is None:
        weights = scores.softmax(-1)
    else:
        k_GSd, v_GSd = (_stretch(cache, plan.common) for cache in (keys, values))
        common = _by_all(q_BHd, k_GSd.transpose(1, 2))
        weights = torch.cat((common, scores), dim=2).softmax(-1)
        common, weights = weights.tensor_split((common.shape[2],), dim=2)
        common_sums = _by_all(common, v_GSd)
    # 3. Weighted sums of each block, and of a sequence's blocks.
    weights = weights.reshape(batch, num_heads, width, block_size).transpose(1, 2)
    weights = weights.reshape(-1, num_heads, block_size).index_select(0, plan.place_U)
    weights[0].zero_()  # block 0 pads the tables: its sum must be 0, whatever its owner's query
    sums = torch.bmm(weights.view(-1, group, block_size), v_USd)
    sums = sums.view(num_blocks, num_heads, head_dim).index_select(0, table)
    out_BHd = sums.view(batch, width, num_heads, head_dim).sum(1)
    return out_BHd if common_sums is None else out_BHd.add_(common_sums)


def _by_head(cache: Tensor, blocks: slice | Tensor) -> Tensor:
    """Return (U · Hkv, block_size, hd): a view if the blocks are a slice laid out by head."""
    by_head = cache.transpose(1, 2)
    chosen = by_head[blocks] if isinstance(blocks, slice) else by_head.index_select(0, blocks)
    return chosen.flatten(0, 1)


def _stretch(cache: Tensor, blocks: Tensor) -> Tensor:
    """Return the positions of some blocks one after the other: (Hkv, S, hd)."""
    return cache.transpose(1, 2).index_select(0, blocks).transpose(0, 1).flatten(1, 2)


def _by_all(rows_BHX: Tensor, matrices_GXY: Tensor) -> Tensor:
    """Multiply the rows of all sequences by one matrix for each key head; (B, H, Y)."""
    batch, num_heads, width = rows_BHX.shape
    num_kv_heads = len(matrices_GXY)
    rows = rows_BHX.reshape(batch, num_kv_heads, -1, width).transpose(0, 1)
    out = torch.bmm(rows.reshape(num_kv_heads, -1, width), matrices_GXY)
    return (
        out.view(num_kv_heads, batch, num_heads // num_kv_heads, -1).transpose(0, 1).flatten(1, 2)
    )


def _num_common(decodes: tuple[Segment, ...], block_size: int) -> int:
    """Return with how many full blocks all decodes begin; each keeps a block of its own.

    With blocks of 4, decodes at positions 9 and 8 with blocks (2, 5, 6) and (2, 5, 7): 2.
    """
    if len(decodes) < 2:
        return 0
    first = decodes[0].blocks
    count = min(segment.start for segment in decodes) // block_size
    for other in decodes[1:]:
        if other.blocks[:count] != first[:count]:
            pairs = zip(first, other.blocks, strict=False)
            count = next(at for at, (one, another) in enumerate(pairs) if one != another)
    return count


def _lay_out(decodes: tuple[Segment, ...], block_size: int, device: torch.device) -> Decodes:
    """Lay the decodes' blocks out; see `Decodes`.

    With blocks of 4, decodes at positions 5 and 2 with blocks (2, 5) and (3,) see blocks 0 to 5:
    owners ``[0, 0, 0, 1, 0, 0]``, tables ``[[2, 5], [3, 0]]``, places ``[0, 0, 0, 2, 0, 1]``.
    """
    skip = _num_common(decodes, block_size)
    lengths = [segment.start + 1 - skip * block_size for segment in decodes]
    counts = [-(-length // block_size) for length in lengths]
    width = max(counts)
    used = np.concatenate(
        [
            np.array(s.blocks[skip : skip + n], np.int64)
            for s, n in zip(decodes, counts, strict=True)
        ]
    )
    owner = np.repeat(np.arange(len(decodes)), counts)
    cell = owner * width + np.concatenate([np.arange(n) for n in counts])
    num_blocks, compact = int(used.max()) + 1, len(used) + 1
    in_place = num_blocks <= FEW_STRANGERS * compact and np.bincount(used).max() == 1
    at = used if in_place else np.arange(1, compact)
    num_places = num_blocks if in_place else compact
    owner_U, place_U = np.zeros(num_places, np.int64), np.zeros(num_places, np.int64)
    table = np.zeros(len(decodes) * width, np.int64)
    owner_U[at], place_U[at], table[cell] = owner, cell, at
    unseen = np.arange(width * block_size) >= np.array(lengths)[:, None]
    rows = np.array([segment.first_row for segment in decodes], np.int64)
    stack = torch.from_numpy(np.concatenate(([0], used)))
    return Decodes(
        rows_B=torch.from_numpy(rows).to(device),
        blocks=slice(0, num_blocks) if in_place else stack.to(device),
        owner_U=torch.from_numpy(owner_U).to(device),
        table_BM=torch.from_numpy(table.reshape(len(decodes), width)).to(device),
        place_U=torch.from_numpy(place_U).to(device),
        unseen_BS=torch.from_numpy(unseen[:, None]).to(device),
        common=torch.tensor(decodes[0].blocks[:skip], device=device) if skip else None,
    )
