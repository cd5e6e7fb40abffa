"""Order (token, slot) pairs by expert and cut each expert's rows into blocks, on the device.

Nothing is read back: what depends on the ids (how many rows, which blocks are in use) stays in
device arrays of a size the host can bound. A pair's row is counted, never drawn from an atomic, so
the order is the stable one of `engine.kernels.permute`, bit for bit. Called by
`engine.kernels.gpu.layer`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import triton
from torch import Tensor

from engine.errors import KernelError
from engine.kernels import checks
from engine.kernels.gpu.permute_kernels import (
    count_chunks,
    map_blocks,
    permute_quadratic,
    place_chunks,
    scan_chunks,
)
from engine.kernels.gpu.variant import Variant
from engine.kernels.quant import FORMAT_ROWS

QUADRATIC_PAIRS = 4096
"""Up to here one launch compares every pair with every other; beyond, four count by chunks."""
CHUNK = 128
_TILE, _PLACE_TILE = 64, 32
_COUNT_TILE, _COUNT_WARPS = 256, 2
"""A histogram's tile is no smaller than its threads are many: Triton counts what threads hold, and
a smaller tile is held twice."""
_BLOCK_TILE = 16
_SCAN_ROWS, _SCAN_EXPERTS = 64, 32


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockedPermutation:
    """How N = T·K pairs map to R rows ordered by expert, and those rows to blocks.

    R, the pairs that are not -1, is known on the device alone: it is `offsets[P]`.
    """

    num_physical: int
    """P."""
    block_rows: int
    """Most rows of one expert in a block."""
    format_rows: int
    """Rows of one expert that share a number format; `block_rows` is a multiple."""
    source_N: Tensor
    """(N,) int64 the token of each row; entries from R on are not written."""
    row_of_N: Tensor
    """(N,) int64 the row of each (token, slot) pair, slot fastest; R for a pair without expert."""
    offsets: Tensor
    """(P + 1,) int64 the first row of each expert, then R."""
    tally: Tensor
    """(lanes,) int32, P + 2 or more: rows of each expert, a count of no meaning, `bad_ids`."""
    block_expert_B: Tensor
    """(B,) int32 the expert of each block; -1 past the last block in use."""
    block_row_B: Tensor
    """(B,) int64 the first row of each block."""
    block_unit_B: Tensor
    """(B,) int32 the first format unit of each block, in the order of experts."""
    chunk_counts: Tensor = field(repr=False)
    """(chunks, lanes) int32 scratch; empty where N is small."""
    num_tokens: int | None = None
    """T of the ids that were permuted; None before `permute`."""

    @property
    def counts_P(self) -> Tensor:
        """(P,) int32 rows of each expert."""
        return self.tally[: self.num_physical]

    @property
    def bad_ids(self) -> Tensor:
        """() int32 how many ids were neither -1 nor an expert's; they are skipped like -1."""
        return self.tally[self.num_physical + 1]

    @property
    def num_rows(self) -> Tensor:
        """(1,) int64 R."""
        return self.offsets[self.num_physical :]


def num_blocks_bound(num_pairs: int, num_physical: int, block_rows: int) -> int:
    """Return the most blocks that N pairs can need: every expert in use may leave one part full.

    5 pairs on 3 experts in blocks of 4 need at most 3 blocks: 3 + 1 + 1 rows, say.
    """
    used = min(num_pairs, num_physical)
    return (num_pairs + used * (block_rows - 1)) // block_rows


def empty_permutation(
    num_pairs: int,
    num_physical: int,
    block_rows: int,
    device: torch.device | str,
    *,
    format_rows: int = FORMAT_ROWS,
) -> BlockedPermutation:
    """Allocate what `permute` fills for N pairs.

    Raises:
        KernelError: a size that is not allowed.
    """
    checks.at_least("num_pairs", num_pairs, 0)
    checks.at_least("num_physical", num_physical, 1)
    checks.block_sizes(block_rows, format_rows)
    arrays = {
        name: torch.zeros(size, dtype=dtype, device=device)
        for name, (size, dtype) in _arrays(num_pairs, num_physical, block_rows).items()
    }
    arrays["block_expert_B"].fill_(-1)
    return BlockedPermutation(
        num_physical=num_physical,
        block_rows=block_rows,
        format_rows=format_rows,
        num_tokens=None,
        **arrays,
    )


def _arrays(
    num_pairs: int, num_physical: int, block_rows: int
) -> dict[str, tuple[int, torch.dtype]]:
    """Return the size and format of each array for N pairs over P experts."""
    num_blocks = num_blocks_bound(num_pairs, num_physical, block_rows)
    chunks = triton.cdiv(num_pairs, CHUNK) if num_pairs > QUADRATIC_PAIRS else 0
    return {
        "source_N": (num_pairs, torch.int64),
        "row_of_N": (num_pairs, torch.int64),
        "offsets": (num_physical + 1, torch.int64),
        "tally": (_lanes(num_physical), torch.int32),
        "block_expert_B": (num_blocks, torch.int32),
        "block_row_B": (num_blocks, torch.int64),
        "block_unit_B": (num_blocks, torch.int32),
        "chunk_counts": (chunks * _lanes(num_physical), torch.int32),
    }


def _check_out(
    out: BlockedPermutation, ids_TK: Tensor, num_physical: int, block_rows: int, format_rows: int
) -> None:
    """Require arrays of `empty_permutation` for just these sizes."""
    for name, value in (
        ("num_physical", num_physical),
        ("block_rows", block_rows),
        ("format_rows", format_rows),
    ):
        if getattr(out, name) != value:
            raise KernelError(
                f"out has {name} {getattr(out, name)} but the call asks for {value}; allocate it "
                f"for the same sizes."
            )
    because = f"ids_TK {checks.describe(ids_TK)} over {num_physical} experts"
    for name, (size, dtype) in _arrays(ids_TK.numel(), num_physical, block_rows).items():
        array = getattr(out, name)
        checks.memory(f"out.{name}", array, (size,), dtype, because)
        checks.same_device(**{"ids_TK": ids_TK, f"out.{name}": array})


def permute(
    ids_TK: Tensor,
    num_physical: int,
    block_rows: int,
    *,
    format_rows: int = FORMAT_ROWS,
    out: BlockedPermutation | None = None,
) -> BlockedPermutation:
    """Sort the pairs by physical expert; within one expert tokens keep their order.

    Ids ``[[1, 0], [1, -1]]`` over 2 experts in blocks of 16 give ``source = [0, 0, 1]``,
    ``row_of = [1, 0, 2, 3]``, ``offsets = [0, 1, 3]`` and the blocks ``(expert 0, row 0), (expert
    1, row 1)``.

    Args:
        ids_TK: (T, K) int32 or int64 of any strides, ids 0..num_physical-1 or -1 for "no expert".
            Others are skipped as well and counted in `bad_ids`.
        num_physical: P.
        block_rows: rows of one expert in a block, a power of two.
        format_rows: rows of one expert that share a number format; divides `block_rows`.
        out: arrays of `empty_permutation` for the same sizes, to write to; the result holds them.

    Raises:
        KernelError: `ids_TK` is no matrix of integers, a size is not allowed, or `out` is of other
            sizes.
    """
    checks.ids_matrix("ids_TK", ids_TK)
    num_pairs = ids_TK.numel()
    if out is None:
        out = empty_permutation(
            num_pairs, num_physical, block_rows, ids_TK.device, format_rows=format_rows
        )
    else:
        _check_out(out, ids_TK, num_physical, block_rows, format_rows)
    out = replace(out, num_tokens=ids_TK.shape[0])
    if num_pairs == 0:
        out.offsets.zero_()  # no rows, and the arrays of blocks are empty
        out.tally.zero_()
        return out
    layout = (*ids_TK.stride(), ids_TK.shape[1])
    sizes = {"P": num_physical, "LANES": _lanes(num_physical)}
    blocks = (out.offsets, out.block_expert_B, out.block_row_B, out.block_unit_B)
    num_blocks = out.block_expert_B.shape[0]
    map_sizes = {"B": out.block_rows, "U": out.format_rows, "BLOCK_TILE": _BLOCK_TILE}
    map_programs = triton.cdiv(num_blocks, _BLOCK_TILE)
    if num_pairs <= QUADRATIC_PAIRS:
        pair_programs = triton.cdiv(num_pairs, _TILE)
        permute_quadratic[(pair_programs + map_programs,)](
            ids_TK, *layout, num_pairs, out.source_N, out.row_of_N, out.tally, *blocks, num_blocks,
            pair_programs, **sizes, **map_sizes, STEPS=_steps(num_pairs, _TILE), TILE=_TILE,
            COUNT_STEPS=_steps(num_pairs, _COUNT_TILE), COUNT_TILE=_COUNT_TILE,
        )  # fmt: skip
        return out
    chunks = triton.cdiv(num_pairs, CHUNK)
    pairs = (ids_TK, *layout, num_pairs)
    count_chunks[(chunks,)](*pairs, out.chunk_counts, **sizes, CHUNK=CHUNK, num_warps=_COUNT_WARPS)
    scan_chunks[(triton.cdiv(_lanes(num_physical), _SCAN_EXPERTS),)](
        out.chunk_counts, out.tally, chunks, LANES=sizes["LANES"], STEPS=_steps(chunks, _SCAN_ROWS),
        ROWS=_SCAN_ROWS, EXPERTS=_SCAN_EXPERTS,
    )  # fmt: skip
    map_blocks[(map_programs,)](out.tally, *blocks, num_blocks, **sizes, **map_sizes)
    place_chunks[(chunks,)](
        *pairs, out.chunk_counts, out.offsets, out.source_N, out.row_of_N, **sizes, CHUNK=CHUNK,
        TILE=_PLACE_TILE,
    )  # fmt: skip
    return out


def append_shared(
    ids_TK: Tensor, weights_TK: Tensor, num_physical: int, *, num_shared: int = 1
) -> tuple[Tensor, Tensor]:
    """Let every token also take the shared experts, which follow the P routed ones.

    Ids ``[[1, 0]]`` over 2 experts become ``[[1, 0, 2]]``, with weight 1 in the last place; the
    shared expert's weights stand last in the stack and its rows ride in the same launch.

    Args:
        ids_TK: (T, K) experts of each token.
        weights_TK: (T, K) routing weights.
        num_physical: P, routed experts alone.
        num_shared: S; a shared expert S times as wide as a routed one is S experts.

    Returns:
        ids and weights, (T, K + S) each.

    Raises:
        KernelError: an argument does not fit the others.
    """
    checks.ids_matrix("ids_TK", ids_TK)
    because = f"ids_TK {checks.describe(ids_TK)}"
    checks.shape("weights_TK", weights_TK, tuple(ids_TK.shape), because)
    checks.same_device(ids_TK=ids_TK, weights_TK=weights_TK)
    checks.at_least("num_physical", num_physical, 1)
    checks.at_least("num_shared", num_shared, 0)
    shared = torch.arange(num_physical, num_physical + num_shared, device=ids_TK.device)
    ids = torch.cat((ids_TK, shared.to(ids_TK.dtype).expand(ids_TK.shape[0], -1)), dim=1)
    ones = weights_TK.new_ones(weights_TK.shape[0], num_shared)
    return ids, torch.cat((weights_TK, ones), dim=1)


def _lanes(num_physical: int) -> int:
    """P experts, the pairs without one and the bad ids, in a power of two of at least 32."""
    return max(32, int(triton.next_power_of_2(num_physical + 2)))


def _steps(size: int, tile: int) -> int:
    """Turns of a loop over `size`, as a power of two: few kernels are compiled for many sizes."""
    return int(triton.next_power_of_2(triton.cdiv(size, tile)))


def variants() -> tuple[Variant, ...]:
    """Return what is compiled for a device: the two ways for 8 and for 512 experts."""
    pairs = {"ids_ptr": "*i64", "stride_t": "i32", "stride_k": "constexpr", "K": "i32"}
    blocks = {"offsets_ptr": "*i64", "expert_ptr": "*i32", "row_ptr": "*i64", "unit_ptr": "*i32"}
    rows = {"source_ptr": "*i64", "row_of_ptr": "*i64"}
    count, chunks, tally = {"num_pairs": "i32"}, {"chunk_counts_ptr": "*i32"}, {"tally_ptr": "*i32"}
    total = {"num_blocks": "i32"}
    arguments = {
        permute_quadratic: pairs | count | rows | tally | blocks | total
        | {"pair_programs": "i32"},
        count_chunks: pairs | count | chunks,
        scan_chunks: chunks | tally | {"num_chunks": "i32"},
        map_blocks: tally | blocks | total,
        place_chunks: pairs | count | chunks | {"offsets_ptr": "*i64"} | rows,
    }  # fmt: skip
    found = []
    for kernel, given in arguments.items():
        for num_physical in (8, 512):
            values = {"P": num_physical, "LANES": _lanes(num_physical), "B": 16, "U": 16}
            values |= {"BLOCK_TILE": _BLOCK_TILE, "STEPS": 8, "TILE": _TILE, "CHUNK": CHUNK}
            values |= {"COUNT_STEPS": 2, "COUNT_TILE": _COUNT_TILE}
            values |= {"ROWS": _SCAN_ROWS, "EXPERTS": _SCAN_EXPERTS, "stride_k": 1}
            if kernel is place_chunks:
                values["TILE"] = _PLACE_TILE
            constexprs = {name: values[name] for name in kernel.arg_names if name not in given}
            if "stride_k" in given:
                constexprs["stride_k"] = 1
            signature = {name: given.get(name, "constexpr") for name in kernel.arg_names}
            name = f"{kernel.__name__}.{num_physical}"
            found.append(
                Variant(
                    name=name,
                    kernel=kernel,
                    signature=signature,
                    constexprs=constexprs,
                    num_warps=_COUNT_WARPS if kernel is count_chunks else 4,
                )
            )
    return tuple(found)
