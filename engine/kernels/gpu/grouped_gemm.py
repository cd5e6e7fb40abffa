"""The experts' feed-forward over blocks of rows, in one launch for each of its two products.

Rows are read through the permutation, so that the activations are never copied into padded groups.
A thread block takes the rows of one block of one expert and a tile of its output channels; weights
stand left and tokens right of the product (see `engine.kernels.gpu.tiles`). Where a block mixes
number formats it is computed once in each and every row keeps its own; a block of one format, the
usual case, is computed once. The routing weight is not applied here: it stays with combine.

Waits for nothing and reads nothing back. Called by `engine.kernels.gpu.layer`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from engine.errors import KernelError
from engine.kernels import checks
from engine.kernels.gpu.experts import (
    NATIVE_SCHEMES,
    ONE_BYTE,
    ExpertStack,
    Scratch,
    empty_scratch,
    row_format,
)
from engine.kernels.gpu.grouped_product import grouped_product
from engine.kernels.gpu.permute import BlockedPermutation, num_blocks_bound
from engine.kernels.gpu.quant import quantise_rows
from engine.kernels.gpu.tiles import BLOCK_ROWS, SCHEMES, Tile, TileChoice, choose_tiles
from engine.kernels.gpu.variant import Variant
from engine.kernels.quant import FORMAT_ROWS, FORMATS, QuantisedWeights

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def grouped_mlp(
    x_TD: Tensor,
    permutation: BlockedPermutation,
    experts: ExpertStack,
    *,
    tiles: TileChoice,
    formats_U: Tensor | None = None,
    stack_of_P: Tensor | None = None,
    scratch: Scratch | None = None,
) -> Tensor:
    """Run each token through each of its experts' SwiGLU: ``down(silu(gate(x)) * up(x))``.

    Args:
        x_TD: (T, D) the tokens, of any row stride.
        permutation: of the tokens' ids, in blocks of `tiles.gate_up.tokens` rows.
        experts: their weights.
        tiles: of `tiles_for`.
        formats_U: (U or more,) int8 on the device for the `mixed_*` schemes: the format
            (`quant.NATIVE`, `INT8`, `E4M3`) of each unit of `permutation.format_rows` rows, units
            of expert 0 first. Expert 0 with 20 rows and expert 1 with 3 have units of 16, 4 and 3
            rows. Another format than the scheme's two counts as native. How many units are in use
            is known on the device alone, so U is `num_blocks_bound(N, P, format_rows)`.
        stack_of_P: (P,) integers, where in the stack each physical expert's weights lie; P = E
            and in order when None. Its range is checked where it lies on the host; on a GPU that
            would wait, so the caller answers for it.
        scratch: of `empty_scratch` for the same sizes, to work in.

    Returns:
        (N, D) in the format of `x_TD`, rows in the order of the permutation; those from R on are
        not written.

    Raises:
        KernelError: an argument does not fit the others.
    """
    _check(x_TD, permutation, experts, tiles, formats_U, stack_of_P)
    num_pairs = permutation.source_N.shape[0]
    if scratch is None:
        scratch = empty_scratch(x_TD.shape[0], num_pairs, experts, x_TD.dtype, x_TD.device)
    else:
        _check_scratch(scratch, x_TD, num_pairs, experts)
    if num_pairs == 0:
        return scratch.out_ND
    name, one_byte = row_format(experts.scheme), experts.quantised
    tokens = rows = None
    if name is not None:
        tokens = quantise_rows(x_TD, name, out=scratch.tokens)
    _launch(
        _Operands(x_TD, tokens, experts.gate_up, one_byte.gate_up if one_byte else None),
        scratch.inner_NF, permutation, experts.scheme, tiles.gate_up, True, formats_U, stack_of_P,
    )  # fmt: skip
    if name is not None:
        num_rows = permutation.num_rows
        rows = quantise_rows(scratch.inner_NF, name, num_rows=num_rows, out=scratch.rows)
    _launch(
        _Operands(scratch.inner_NF, rows, experts.down, one_byte.down if one_byte else None),
        scratch.out_ND, permutation, experts.scheme, tiles.down, False, formats_U, stack_of_P,
    )  # fmt: skip
    return scratch.out_ND


def _check(
    x_TD: Tensor,
    permutation: BlockedPermutation,
    experts: ExpertStack,
    tiles: TileChoice,
    formats_U: Tensor | None,
    stack_of_P: Tensor | None,
) -> None:
    checks.rows("x_TD", x_TD, experts.any_gate_up)
    checks.contiguous_rows("x_TD", x_TD)
    if experts.gate_up is not None and experts.gate_up.dtype != x_TD.dtype:
        raise KernelError(
            f"x_TD is {checks.describe(x_TD)} but gate_up is {checks.describe(experts.gate_up)}; "
            f"both need one format."
        )
    if permutation.block_rows != tiles.gate_up.tokens:
        raise KernelError(
            f"the permutation has blocks of {permutation.block_rows} rows but the tiles take "
            f"{tiles.gate_up.tokens}; permute with block_rows={tiles.gate_up.tokens}."
        )
    if permutation.num_tokens != x_TD.shape[0]:
        raise KernelError(
            f"x_TD is {checks.describe(x_TD)} but the permutation is of {permutation.num_tokens} "
            f"tokens; permute the ids of these tokens."
        )
    if stack_of_P is not None:
        _check_stack(stack_of_P, permutation.num_physical, experts)
    elif permutation.num_physical != experts.num_experts:
        raise KernelError(
            f"the permutation is over {permutation.num_physical} experts but gate_up is "
            f"{checks.describe(experts.any_gate_up)}; pass stack_of_P."
        )
    mixed = experts.scheme.startswith("mixed")
    if mixed != (formats_U is not None):
        does = "needs" if mixed else "takes no"
        raise KernelError(f"scheme {experts.scheme} {does} formats_U.")
    if formats_U is not None:
        _check_formats(formats_U, permutation)
    checks.same_device(
        x_TD=x_TD, offsets=permutation.offsets, formats_U=formats_U, stack_of_P=stack_of_P
    )


def _check_formats(formats_U: Tensor, permutation: BlockedPermutation) -> None:
    """Require a format for every unit that any ids could need."""
    checks.rank("formats_U", formats_U, "U")
    checks.one_of("formats_U", formats_U, (torch.int8,))
    checks.contiguous("formats_U", formats_U)
    num_pairs, unit = permutation.source_N.shape[0], permutation.format_rows
    needed = num_blocks_bound(num_pairs, permutation.num_physical, unit)
    if formats_U.shape[0] < needed:
        raise KernelError(
            f"formats_U is {checks.describe(formats_U)} but must be ({needed},) or more to fit "
            f"{num_pairs} pairs over {permutation.num_physical} experts in units of {unit} rows."
        )


def _check_stack(stack_of_P: Tensor, num_physical: int, experts: ExpertStack) -> None:
    """Require a place for each physical expert; places are read on the host alone."""
    because = f"the permutation's {num_physical} experts"
    checks.shape("stack_of_P", stack_of_P, (num_physical,), because)
    checks.one_of("stack_of_P", stack_of_P, (torch.int64, torch.int32))
    checks.contiguous("stack_of_P", stack_of_P)
    if stack_of_P.device.type != "cpu":
        return
    for place in (int(stack_of_P.min()), int(stack_of_P.max())):
        if not 0 <= place < experts.num_experts:
            raise KernelError(
                f"stack_of_P {checks.describe(stack_of_P)} holds the place {place} but gate_up "
                f"{checks.describe(experts.any_gate_up)} has 0 to {experts.num_experts - 1}."
            )


def _check_scratch(scratch: Scratch, x_TD: Tensor, num_pairs: int, experts: ExpertStack) -> None:
    """Require what `empty_scratch` gives for these sizes."""
    because = f"x_TD {checks.describe(x_TD)} and {num_pairs} pairs"
    wanted = empty_scratch(x_TD.shape[0], num_pairs, experts, x_TD.dtype, "meta")

    def check(name: str, given: Tensor, like: Tensor) -> None:
        checks.memory(name, given, tuple(like.shape), like.dtype, because)
        checks.same_device(**{"x_TD": x_TD, name: given})

    check("scratch.inner_NF", scratch.inner_NF, wanted.inner_NF)
    check("scratch.out_ND", scratch.out_ND, wanted.out_ND)
    for name, given, like in (
        ("scratch.tokens", scratch.tokens, wanted.tokens),
        ("scratch.rows", scratch.rows, wanted.rows),
    ):
        if like is None:
            continue
        if given is None:
            raise KernelError(f"{name} is None but scheme {experts.scheme} needs it; allocate it.")
        check(f"{name}[0]", given[0], like[0])
        check(f"{name}[1]", given[1], like[1])


class _Operands(NamedTuple):
    """The two sides of a product, in the rows' format and in one byte."""

    rows: Tensor
    one_byte_rows: tuple[Tensor, Tensor] | None
    weights: Tensor | None
    one_byte_weights: QuantisedWeights | None


def _launch(
    operands: _Operands,
    out: Tensor,
    permutation: BlockedPermutation,
    scheme: str,
    tile: Tile,
    gated: bool,
    formats_U: Tensor | None,
    stack_of_P: Tensor | None,
) -> None:
    rows, one_byte_rows, weights, quantised = operands
    native = scheme in NATIVE_SCHEMES
    values: Tensor | None = None
    row_scales: Tensor | None = None
    if one_byte_rows is not None:
        values, row_scales = one_byte_rows
    elif scheme == "w8a16":
        values = rows
    mixed = formats_U is not None
    num_blocks, width = permutation.block_expert_B.shape[0], out.shape[1]
    grouped_product[(num_blocks * triton.cdiv(width, tile.features),)](
        rows if native else None,
        weights if native else None,
        values,
        row_scales,
        quantised.values if quantised is not None else None,
        quantised.scales if quantised is not None else None,
        out,
        permutation.source_N if gated else None,
        permutation.offsets,
        permutation.block_expert_B,
        permutation.block_row_B,
        permutation.block_unit_B if mixed else None,
        formats_U,
        stack_of_P,
        num_blocks,
        **_constants(
            scheme, tile, gated, rows.shape[1], width, rows.stride(0), permutation.format_rows
        ),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _constants(
    scheme: str, tile: Tile, gated: bool, depth: int, width: int, stride: int, unit: int
) -> dict[str, Any]:
    """Return what the kernel is compiled for."""
    return {
        "DEPTH": depth,
        "WIDTH": width,
        "STRIDE": stride,
        "VALUES_STRIDE": stride if scheme == "w8a16" else depth,
        "GATED": gated,
        "NATIVE": scheme in NATIVE_SCHEMES,
        "ONE_BYTE": scheme in ONE_BYTE,
        "FORMAT": FORMATS.get(ONE_BYTE.get(scheme, ""), 0),
        "UNIT": unit,
        "TOKENS": tile.tokens,
        "FEATURES": tile.features,
        "TILE_DEPTH": tile.depth,
        "GROUP": tile.group,
    }


def variants() -> tuple[Variant, ...]:
    """Return what is compiled for a device: each scheme, block size, whole and masked widths.

    bf16 in full, since its code and that of the one-byte formats is what runs; fp16 and fp32 for
    the native scheme, whose code is the same but for the type.
    """
    whole, masked = (4096, 1536, ""), (2896, 1000, ".masked")
    found: list[Variant] = []
    for rows in BLOCK_ROWS:
        for scheme in SCHEMES:
            for shape in (whole, masked):
                found += _both(scheme, "bfloat16", rows, *shape)
        found += _both("native", "float16", rows, *whole)
        found += _both("native", "float32", rows, *whole)
    return tuple(found)


def _both(
    scheme: str, dtype: str, rows: int, width: int, inner: int, suffix: str
) -> tuple[Variant, Variant]:
    tiles, short = choose_tiles(scheme, dtype, rows), _SHORT[dtype]
    return (
        _variant(scheme, short, tiles.gate_up, True, width, inner, suffix),
        _variant(scheme, short, tiles.down, False, inner, width, suffix),
    )


def _variant(
    scheme: str, dtype: str, tile: Tile, gated: bool, depth: int, width: int, suffix: str
) -> Variant:
    native, one_byte = scheme in NATIVE_SCHEMES, ONE_BYTE.get(scheme)
    mixed = native and one_byte is not None
    row, value = f"*{dtype}", {"int8": "*i8", "e4m3": "*fp8e4nv", None: None}[one_byte]
    types: dict[str, str | None] = {
        "x_ptr": row if native else None,
        "w_ptr": row if native else None,
        "values_ptr": row if scheme == "w8a16" else value,
        "row_scales_ptr": "*fp32" if row_format(scheme) else None,
        "w_values_ptr": value,
        "w_scales_ptr": "*fp32" if one_byte else None,
        "out_ptr": row,
        "source_ptr": "*i64" if gated else None,
        "offsets_ptr": "*i64",
        "block_expert_ptr": "*i32",
        "block_row_ptr": "*i64",
        "block_unit_ptr": "*i32" if mixed else None,
        "formats_ptr": "*i8" if mixed else None,
        "stack_ptr": None,
        "num_blocks": "i32",
    }
    constants = _constants(scheme, tile, gated, depth, width, depth, FORMAT_ROWS)
    absent: dict[str, Any] = {name: None for name, kind in types.items() if kind is None}
    operands = {"w8a8": "int8", "e4m3": "fp8"}.get(scheme, dtype)
    return Variant(
        name=f"{'gate_up' if gated else 'down'}.{scheme}.{dtype}.{tile}{suffix}",
        kernel=grouped_product,
        signature={name: types.get(name) or "constexpr" for name in grouped_product.arg_names},
        constexprs=absent | constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        dtype=operands,
        needs_tensor_cores=operands != "fp32",
        min_capability=89 if one_byte == "e4m3" else 80,
    )
