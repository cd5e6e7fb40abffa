"""oneDNN's products with weights packed once, as torch exposes them on x86 CPUs.

A kernel is compiled, in about a millisecond, for each new number of rows; callers round theirs up
with `size_class`, so that they are few. Called by `dense` and `cpu_experts`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


def missing(dtype: str) -> str | None:
    """Say why this build of torch or this processor cannot run packed products of `dtype`."""
    # torch 2.13 leaves this function without types, 2.11 does not.
    available: Any = torch.backends.mkldnn.is_available
    if not available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return "this build of torch has no oneDNN"
    if dtype == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this processor has no bf16 products"
    return None


def size_class(count: int) -> int:
    """Round a number of rows up to one of few: exact to 16, then eight to each doubling.

    17 becomes 18, 33 becomes 36, 100 becomes 104.
    """
    if count <= 16:
        return count
    step = 1 << (count - 1).bit_length() - 4
    return -(-count // step) * step


def pack(matrix_OI: Tensor) -> Tensor:
    """Return a copy of an fp32 or bf16 matrix in the layout that `linear` reads."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(matrix_OI.contiguous(), None)
    return packed


def linear(x_TI: Tensor, packed: Tensor) -> Tensor:
    """Multiply contiguous rows, at least one, by a packed matrix; (T, O)."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise.default(x_TI, packed, None, "none", [], "")
    return out


def pack_int8(values_OI: Tensor) -> Tensor:
    """Return a copy of an int8 matrix in the layout that `linear_int8` and `linear_uint8` read."""
    packed: Tensor = torch.ops.onednn.qlinear_prepack(values_OI.contiguous(), None)
    return packed


def linear_int8(values_TI: Tensor, packed: Tensor, scales_O: Tensor) -> Tensor:
    """Multiply contiguous int8 rows, at least two, by a packed int8 matrix.

    Sums are int32. With one row oneDNN compiles its kernel again at every call, in 8 ms. Fast where
    the processor has AMX; elsewhere it takes milliseconds a row.

    Returns:
        (T, O) fp32, scaled by output channel.
    """
    return _linear_one_byte(values_TI, 0, packed, scales_O)


def linear_uint8(values_TI: Tensor, packed: Tensor, scales_O: Tensor) -> Tensor:
    """Do the same with rows moved to 0 to 255 and a zero point of 128, which VNNI multiplies."""
    return _linear_one_byte(values_TI.view(torch.uint8).bitwise_xor(128), 128, packed, scales_O)


def _linear_one_byte(values_TI: Tensor, zero: int, packed: Tensor, scales_O: Tensor) -> Tensor:
    out: Tensor = torch.ops.onednn.qlinear_pointwise.default(
        values_TI, 1.0, zero, packed, scales_O, _no_zero_point(),
        None, 1.0, 0, torch.float32, "none", [], "",
    )  # fmt: skip
    return out


@cache
def _no_zero_point() -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros(1, dtype=torch.int64)
