# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""The kernels that rank pairs by expert and write the block map.

A pair's row is counted, never drawn from an atomic: the pairs of lower experts, and those of its
own that stand before it. Few pairs are all compared with all, in one launch; many are counted by
chunks, whose counts are summed before each pair is placed. Called by `engine.kernels.gpu.permute`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load_keys(ids_ptr, stride_t, stride_k, K, pairs, num_pairs, P: tl.constexpr):
    """Return the expert of each pair; P where it has none and P + 1 where the id is bad."""
    at = (pairs // K).to(tl.int64) * stride_t + (pairs % K).to(tl.int64) * stride_k
    ids = tl.load(ids_ptr + at, mask=pairs < num_pairs, other=-1)
    return tl.where((ids >= 0) & (ids < P), ids, tl.where(ids == -1, P, P + 1)).to(tl.int32)


@triton.jit
def _rank(keys, places, other_keys, other_places):
    """Count, for each pair, the others of the same expert that stand before it."""
    same = keys[:, None] == other_keys[None, :]
    return tl.sum((same & (other_places[None, :] < places[:, None])).to(tl.int32), axis=1)


@triton.jit
def _write_blocks(
    counts, first, offsets_ptr, expert_ptr, row_ptr, unit_ptr, num_blocks,
    P: tl.constexpr, LANES: tl.constexpr, B: tl.constexpr, U: tl.constexpr,
    BLOCK_TILE: tl.constexpr,
):  # fmt: skip
    """Write `BLOCK_TILE` entries of the block map from block `first` on, given all counts.

    What lies before a block is summed over the experts whose last block does.
    """
    lanes = tl.arange(0, LANES)
    counts = tl.where(lanes < P, counts, 0)
    blocks = (counts + B - 1) // B
    units = (counts + U - 1) // U
    last = tl.cumsum(blocks, 0)
    block = first + tl.arange(0, BLOCK_TILE)
    before = last[None, :] <= block[:, None]
    expert = tl.sum(before.to(tl.int32), axis=1)
    index = block - tl.sum(tl.where(before, blocks[None, :], 0), axis=1)
    row = tl.sum(tl.where(before, counts[None, :], 0), axis=1) + index * B
    unit = tl.sum(tl.where(before, units[None, :], 0), axis=1) + index * (B // U)
    inside = block < num_blocks
    used = expert < P
    tl.store(expert_ptr + block, tl.where(used, expert, -1), mask=inside)
    tl.store(row_ptr + block, tl.where(used, row, 0).to(tl.int64), mask=inside)
    tl.store(unit_ptr + block, tl.where(used, unit, 0), mask=inside)
    if first == 0:
        ends = tl.cumsum(counts, 0)
        tl.store(offsets_ptr + lanes, (ends - counts).to(tl.int64), mask=lanes <= P)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks", "pair_programs"])
def permute_quadratic(
    ids_ptr, stride_t, stride_k, K, num_pairs, source_ptr, row_of_ptr, tally_ptr,
    offsets_ptr, expert_ptr, row_ptr, unit_ptr, num_blocks, pair_programs,
    P: tl.constexpr, LANES: tl.constexpr, B: tl.constexpr, U: tl.constexpr,
    BLOCK_TILE: tl.constexpr, STEPS: tl.constexpr, TILE: tl.constexpr,
    COUNT_STEPS: tl.constexpr, COUNT_TILE: tl.constexpr,
):  # fmt: skip
    """Rank a tile of pairs against all pairs; the programs after those write the block map."""
    pid = tl.program_id(0)
    lanes = tl.arange(0, TILE)
    if pid < pair_programs:
        pairs = pid * TILE + lanes
        keys = tl.minimum(_load_keys(ids_ptr, stride_t, stride_k, K, pairs, num_pairs, P), P)
        row = tl.zeros((TILE,), tl.int32)
        for step in range(STEPS):
            others = step * TILE + lanes
            other = _load_keys(ids_ptr, stride_t, stride_k, K, others, num_pairs, P)
            row += tl.sum((other[None, :] < keys[:, None]).to(tl.int32), axis=1)
            row += tl.where(keys < P, _rank(keys, pairs, other, others), 0)
        inside = pairs < num_pairs
        tl.store(row_of_ptr + pairs, row.to(tl.int64), mask=inside)
        tl.store(source_ptr + row, (pairs // K).to(tl.int64), mask=inside & (keys < P))
    else:
        counts = tl.zeros((LANES,), tl.int32)
        for step in range(COUNT_STEPS):
            pairs = step * COUNT_TILE + tl.arange(0, COUNT_TILE)
            keys = _load_keys(ids_ptr, stride_t, stride_k, K, pairs, num_pairs, P)
            counts += tl.histogram(keys, LANES)
        first = (pid - pair_programs).to(tl.int64) * BLOCK_TILE
        if first == 0:
            tl.store(tally_ptr + tl.arange(0, LANES), counts)
        _write_blocks(
            counts, first, offsets_ptr, expert_ptr, row_ptr, unit_ptr, num_blocks,
            P, LANES, B, U, BLOCK_TILE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs"])
def count_chunks(
    ids_ptr, stride_t, stride_k, K, num_pairs, chunk_counts_ptr,
    P: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Count each chunk's pairs by expert."""
    chunk = tl.program_id(0).to(tl.int64)
    pairs = chunk * CHUNK + tl.arange(0, CHUNK)
    keys = _load_keys(ids_ptr, stride_t, stride_k, K, pairs, num_pairs, P)
    at = chunk_counts_ptr + chunk * LANES + tl.arange(0, LANES)
    tl.store(at, tl.histogram(keys, LANES))


@triton.jit(do_not_specialize=["num_chunks"])
def scan_chunks(
    chunk_counts_ptr, tally_ptr, num_chunks,
    LANES: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Replace each chunk's counts by what the chunks before it hold, and write the totals."""
    experts = tl.program_id(0).to(tl.int64) * EXPERTS + tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    for step in range(STEPS):
        chunks = step * ROWS + tl.arange(0, ROWS).to(tl.int64)
        at = chunk_counts_ptr + chunks[:, None] * LANES + experts[None, :]
        inside = chunks[:, None] < num_chunks
        counts = tl.load(at, mask=inside, other=0)
        tl.store(at, tl.cumsum(counts, 0) - counts + total[None, :], mask=inside)
        total += tl.sum(counts, axis=0)
    tl.store(tally_ptr + experts, total)


@triton.jit(do_not_specialize=["num_blocks"])
def map_blocks(
    tally_ptr, offsets_ptr, expert_ptr, row_ptr, unit_ptr, num_blocks,
    P: tl.constexpr, LANES: tl.constexpr, B: tl.constexpr, U: tl.constexpr,
    BLOCK_TILE: tl.constexpr,
):  # fmt: skip
    """Write the block map and the offsets from the totals."""
    counts = tl.load(tally_ptr + tl.arange(0, LANES))
    first = tl.program_id(0).to(tl.int64) * BLOCK_TILE
    _write_blocks(
        counts, first, offsets_ptr, expert_ptr, row_ptr, unit_ptr, num_blocks,
        P, LANES, B, U, BLOCK_TILE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs"])
def place_chunks(
    ids_ptr, stride_t, stride_k, K, num_pairs, chunk_counts_ptr, offsets_ptr, source_ptr,
    row_of_ptr, P: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Give each pair of a chunk its row: its expert's offset, the chunks before, its rank here."""
    chunk = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, CHUNK)
    pairs = chunk * CHUNK + places
    keys = tl.minimum(_load_keys(ids_ptr, stride_t, stride_k, K, pairs, num_pairs, P), P)
    rank = tl.zeros((CHUNK,), tl.int32)
    for step in range(CHUNK // TILE):
        others = step * TILE + tl.arange(0, TILE)
        other = _load_keys(ids_ptr, stride_t, stride_k, K, chunk * CHUNK + others, num_pairs, P)
        rank += _rank(keys, places, other, others)
    placed = keys < P
    before = tl.load(chunk_counts_ptr + chunk * LANES + keys, mask=placed, other=0)
    row = tl.load(offsets_ptr + keys) + tl.where(placed, before + rank, 0)
    inside = pairs < num_pairs
    tl.store(row_of_ptr + pairs, row, mask=inside)
    tl.store(source_ptr + row, pairs // K, mask=inside & placed)
