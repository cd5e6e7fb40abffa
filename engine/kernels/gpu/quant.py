# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Quantise rows to int8 or e4m3 as they come, one scale a row.

The definition, and the values bit for bit, are those of `engine.kernels.quant.quantise_rows`.
Called by `engine.kernels.gpu.grouped_gemm` on the tokens and on the experts' inner rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.errors import KernelError
from engine.kernels import checks
from engine.kernels.gpu.lang import narrow, round_to_integer
from engine.kernels.gpu.variant import Variant
from engine.kernels.quant import LARGEST, SMALLEST_SCALE

MAX_WIDTH = 32768
"""A row is held in one program's registers."""
DTYPES = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}


def quantise_rows(
    x_RD: Tensor,
    name: str,
    *,
    num_rows: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Write each row as values of one byte and one scale: ``x ≈ values * scale``.

    Args:
        x_RD: (R, D) fp32, bf16 or fp16 of any row stride.
        name: `int8` or `e4m3`.
        num_rows: (1,) int64 on the device; rows from there on are neither read nor written.
        out: values (R, D) and scales (R,) to write to, contiguous.

    Returns:
        values (R, D) and scales (R,) fp32.

    Raises:
        KernelError: `x_RD` is no matrix of floats, is too wide, there is no such format, or another
            argument does not fit.
    """
    checks.rank("x_RD", x_RD, "R, D")
    checks.one_of("x_RD", x_RD, checks.FLOATS)
    checks.contiguous_rows("x_RD", x_RD)
    count, width = x_RD.shape
    if name not in LARGEST:
        raise KernelError(f"format ({name!r}) must be one of {', '.join(LARGEST)}.")
    if width > MAX_WIDTH:
        raise KernelError(f"x_RD is {checks.describe(x_RD)} but rows may be {MAX_WIDTH} wide.")
    if num_rows is not None:
        checks.memory("num_rows", num_rows, (1,), torch.int64, "the one number R")
    if out is not None:
        because = f"x_RD {checks.describe(x_RD)}"
        checks.memory("out[0]", out[0], (count, width), DTYPES[name], because)
        checks.memory("out[1]", out[1], (count,), torch.float32, because)
    values, scales = out or (None, None)
    checks.same_device(x_RD=x_RD, num_rows=num_rows, values=values, scales=scales)
    if out is None:
        values = torch.empty((count, width), dtype=DTYPES[name], device=x_RD.device)
        out = values, torch.empty(count, dtype=torch.float32, device=x_RD.device)
    if count:
        block = _block(width)
        _quantise_rows[(count,)](
            x_RD, *out, num_rows, x_RD.stride(0), D=width, BLOCK=block, LARGEST=LARGEST[name],
            SMALLEST=SMALLEST_SCALE, INTEGER=name == "int8", num_warps=_warps(block),
        )  # fmt: skip
    return out


def _block(width: int) -> int:
    return max(16, int(triton.next_power_of_2(width)))


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


@triton.jit
def _quantise_rows(
    x_ptr, values_ptr, scales_ptr, num_rows_ptr, stride_r,
    D: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
    INTEGER: tl.constexpr,
):  # fmt: skip
    """Quantise one row; one that holds a NaN or an infinity gets zeros and a scale like it."""
    row = tl.program_id(0).to(tl.int64)
    if num_rows_ptr is not None:
        if row >= tl.load(num_rows_ptr):
            return
    columns = tl.arange(0, BLOCK)
    inside = columns < D
    x = tl.load(x_ptr + row * stride_r + columns, mask=inside, other=0.0).to(tl.float32)
    # A maximum passes over NaN, so that it is looked for by itself.
    has_nan = tl.max((x != x).to(tl.int32), axis=0)
    peak = tl.max(tl.where(x == x, tl.abs(x), 0.0), axis=0)
    scale = tl.maximum(tl.div_rn(peak, LARGEST * 1.0), SMALLEST)
    scale = tl.where(has_nan > 0, float("nan"), scale)
    usable = scale < float("inf")
    scaled = tl.div_rn(x, tl.zeros_like(x) + tl.where(usable, scale, 1.0))
    scaled = tl.where(usable, scaled, 0.0)
    scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
    if INTEGER:
        values = round_to_integer(scaled).to(tl.int8)
    else:
        values = narrow(scaled, tl.float8e4nv)
    tl.store(values_ptr + row * D + columns, values, mask=inside)
    tl.store(scales_ptr + row, scale)


def variants() -> tuple[Variant, ...]:
    """Return what is compiled for a device: each pair of formats, whole and masked widths."""
    return tuple(
        Variant(
            name=f"quantise_rows.{dtype}.{name}.{width}",
            kernel=_quantise_rows,
            signature={
                "x_ptr": f"*{dtype}",
                "values_ptr": "*i8" if name == "int8" else "*fp8e4nv",
                "scales_ptr": "*fp32",
                "num_rows_ptr": "*i64",
                "stride_r": "i32",
                "D": "constexpr",
                "BLOCK": "constexpr",
                "LARGEST": "constexpr",
                "SMALLEST": "constexpr",
                "INTEGER": "constexpr",
            },
            constexprs={
                "D": width,
                "BLOCK": _block(width),
                "LARGEST": LARGEST[name],
                "SMALLEST": SMALLEST_SCALE,
                "INTEGER": name == "int8",
            },
            aligned=("stride_r",) if width % 16 == 0 else (),
            num_warps=_warps(_block(width)),
            dtype=dtype,
            min_capability=80 if name == "int8" else 89,
        )
        for dtype in ("bf16", "fp16", "fp32")
        for name in ("int8", "e4m3")
        for width in (7168, 1000)
    )
