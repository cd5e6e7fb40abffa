"""The ways in which a CPU can multiply rows by one expert's matrix, and a plan of which to take.

| way | weights | memory beside the weights | needs |
|---|---|---|---|
| `columns` | fp32, the transpose in memory | none (fp32), 4 bytes a weight (bf16) | - |
| `packed` | fp32 or bf16 in oneDNN's blocks | the same again | oneDNN, bf16 in hardware |
| `half` | bf16 as fp16 in FBGEMM's blocks | the same again | FBGEMM |
| `signed`, `unsigned` | int8 in oneDNN's blocks | - | AMX, VNNI |
| `plain` | int8 as it is | - | VNNI |
| `widened` | int8 as fp32 | 4 bytes a weight | - |

Which is fastest depends on the processor and on the number of rows, so `trials` measures it. Called
by `cpu_experts`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.kernels import onednn
from engine.kernels.dense import Product, by_columns

WIDENED = 1 << 17
"""bf16 matrices of up to this many values may be kept in fp32 as well: a call of oneDNN, which
takes some 25 microseconds, costs more than to read twice the bytes."""
FP16_LARGEST, FP16_LEAST = 65504.0, 2.0**-12
"""A bf16 matrix whose largest value lies between these is as good in fp16: nothing overflows, and
what is rounded, values below 2**-14, is off by less than 2**-13 of the largest."""


class Multiplied(NamedTuple):
    """A matrix made ready for one way."""

    product: Product
    """Takes contiguous (T, I) rows, at least one, in the weights' format, or int8 values; gives (T,
    O) in the rows' format, or for int8 values fp32 scaled by output channel."""
    num_bytes: int
    """Memory beside the weights."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to multiply."""

    name: str
    make: Callable[[Tensor, Tensor | None], Multiplied]
    """Takes a matrix (O, I), and (O,) fp32 scales of its output channels if it is int8."""
    missing: Callable[[], str | None]
    """Says why this machine cannot; None where it can."""
    most: int = 1 << 62
    """Largest matrix, in values, that it is for."""
    last_resort: bool = False
    """Whether it is for machines that have no other."""


class Plan(NamedTuple):
    """Which way to take for how many rows, and why."""

    main: str
    few: str | None = None
    """For fewer rows than `limit`, where another way is better then."""
    limit: int = 0
    reason: str = "a fixed rule"


def candidates(kind: str, size: int) -> list[Way]:
    """Return the ways to multiply matrices of `size` values that this machine has, best bet first.

    Args:
        kind: `float32`, `bfloat16` or `int8`.
        size: O x I.
    """
    found = [way for way in WAYS[kind] if size <= way.most and way.missing() is None]
    return [way for way in found if not way.last_resort or len(found) == 1]


def named(kind: str, name: str) -> Way:
    """Return a way by its name."""
    return next(way for way in WAYS[kind] if way.name == name)


def fixed(kind: str, size: int) -> Plan:
    """Return the plan where nothing is measured.

    It is what was best on a Xeon with AMX, and for processors without AMX on an EPYC.
    """
    names = [way.name for way in candidates(kind, size)]
    amx, small = torch.cpu._is_amx_tile_supported(), size <= WIDENED
    if kind == "float32":
        return Plan("packed", "columns", 4)
    if kind == "bfloat16" and small:
        return Plan("packed", "columns", 8 if amx else 2)
    if kind == "bfloat16" and "half" in names and not amx:
        return Plan("packed", "half", 4)
    if kind == "int8" and "plain" in names and not amx:
        return Plan("plain") if small or len(names) == 1 else Plan(names[0], "plain", 4)
    return Plan(names[0])


def fits_fp16(stack: Tensor) -> bool:
    """Whether bf16 weights lose nothing that matters in fp16."""
    largest = stack.abs().amax().item()
    return bool(FP16_LEAST <= largest <= FP16_LARGEST)


def _columns(matrix_OI: Tensor, _: Tensor | None) -> Multiplied:
    if matrix_OI.dtype == torch.float32:  # a view: whoever prepares has laid the weights out
        columns_IO = matrix_OI.t()
        return Multiplied(lambda x: torch.mm(x, columns_IO), 0)
    wide_IO = by_columns(matrix_OI.float()).t()
    return Multiplied(lambda x: torch.mm(x.float(), wide_IO).to(x.dtype), 4 * matrix_OI.numel())


def _packed(matrix_OI: Tensor, _: Tensor | None) -> Multiplied:
    packed = onednn.pack(matrix_OI)
    num_bytes = matrix_OI.numel() * matrix_OI.element_size()
    return Multiplied(lambda x: onednn.linear(x, packed), num_bytes)


def _half(matrix_OI: Tensor, _: Tensor | None) -> Multiplied:
    packed = torch.ops.quantized.linear_prepack_fp16(matrix_OI.float(), None)
    multiply: Any = torch.ops.quantized.linear_dynamic_fp16.default
    return Multiplied(lambda x: multiply(x.float(), packed).to(x.dtype), 2 * matrix_OI.numel())


def _signed(values_OI: Tensor, scales_O: Tensor | None) -> Multiplied:
    assert scales_O is not None
    packed = onednn.pack_int8(values_OI)

    def product(x: Tensor) -> Tensor:
        if len(x) == 1:  # oneDNN would compile its kernel for one row again at every call
            return onednn.linear_int8(x.expand(2, -1).contiguous(), packed, scales_O)[:1]
        return onednn.linear_int8(x, packed, scales_O)

    return Multiplied(product, _int8(values_OI))


def _unsigned(values_OI: Tensor, scales_O: Tensor | None) -> Multiplied:
    assert scales_O is not None
    packed = onednn.pack_int8(values_OI)
    return Multiplied(lambda x: onednn.linear_uint8(x, packed, scales_O), _int8(values_OI))


def _plain(values_OI: Tensor, scales_O: Tensor | None) -> Multiplied:
    assert scales_O is not None
    values_IO = values_OI.t()
    return Multiplied(lambda x: torch._int_mm(x, values_IO) * scales_O, _int8(values_OI))


def _widened(values_OI: Tensor, scales_O: Tensor | None) -> Multiplied:
    """Multiply in fp32, where whole numbers up to 2**24 are exact."""
    assert scales_O is not None
    wide_IO = by_columns(values_OI.float()).t()
    num_bytes = 4 * (values_OI.numel() + len(scales_O))
    return Multiplied(lambda x: torch.mm(x.float(), wide_IO).mul_(scales_O), num_bytes)


def _int8(values_OI: Tensor) -> int:
    return values_OI.numel() + 4 * values_OI.shape[0]


@cache
def _no_half() -> str | None:
    """Say why FBGEMM's fp16 products cannot be had."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return "this build of torch has no FBGEMM"
    matrix_OI = torch.eye(16)
    try:
        out = _half(matrix_OI, None).product(matrix_OI)
    except (RuntimeError, AttributeError) as error:
        return f"FBGEMM cannot: {str(error).splitlines()[0]}"
    return None if torch.equal(out, matrix_OI) else "FBGEMM multiplies wrongly here"


def _wrong_int8(make: Callable[[Tensor, Tensor | None], Multiplied]) -> str | None:
    """Say so where the largest values do not multiply exactly.

    Older processors add pairs of int8 products in 16 bits, which overflow.
    """
    values = torch.full((32, 64), 127, dtype=torch.int8)
    rows = torch.cat((values[:8], -values[:8]))
    wanted = (rows.float() @ values.float().t()) * 0.5
    try:
        out = make(values, torch.full((32,), 0.5)).product(rows)
    except RuntimeError as error:
        return f"torch cannot: {str(error).splitlines()[0]}"
    return None if torch.equal(out, wanted) else "its sums overflow on this processor"


@cache
def _no_signed() -> str | None:
    if not torch.cpu._is_amx_tile_supported():
        return "this processor has no AMX, without which oneDNN takes milliseconds a row"
    return onednn.missing("int8") or _wrong_int8(_signed)


@cache
def _no_unsigned() -> str | None:
    return onednn.missing("int8") or _wrong_int8(_unsigned)


@cache
def _no_plain() -> str | None:
    return _wrong_int8(_plain)


WAYS = {
    "float32": (
        Way("packed", _packed, lambda: onednn.missing("float32")),
        Way("columns", _columns, lambda: None),
    ),
    "bfloat16": (
        Way("packed", _packed, lambda: onednn.missing("bfloat16")),
        Way("columns", _columns, lambda: None, WIDENED),
        Way("half", _half, _no_half),
    ),
    "int8": (
        Way("signed", _signed, _no_signed),
        Way("unsigned", _unsigned, _no_unsigned),
        Way("plain", _plain, _no_plain),
        Way("widened", _widened, lambda: None, last_resort=True),
    ),
}
"""For each format of the weights the ways to multiply them; the first that there is comes first."""
