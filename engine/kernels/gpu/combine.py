# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Bring the experts' rows home and add them up, weighted, in the order of the slots.

The arithmetic is that of `engine.kernels.combine`, bit for bit: fp32, each product and each sum
rounded by itself (fused multiply-add is switched off), slot 0 first. A token's result depends on
its own rows alone. Called by `engine.kernels.gpu.layer`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels import checks
from engine.kernels.gpu.lang import narrow
from engine.kernels.gpu.variant import Variant


def combine(
    out_RD: Tensor,
    weights_TK: Tensor,
    row_of_N: Tensor,
    *,
    num_rows: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Sum each token's K expert outputs: ``y_t = w_t0 * out[row_t0] + w_t1 * out[row_t1] + …``.

    Args:
        out_RD: (R or more, D) experts' outputs ordered by expert, of any row stride.
        weights_TK: (T, K) fp32 routing weights of any strides.
        row_of_N: (T·K,) int64 row of each pair; one below 0 or at or past `num_rows` adds nothing.
        num_rows: (1,) int64 on the device, R; all rows of `out_RD` count when None, and never more.
        out: (T, D) contiguous, to write to.

    Returns:
        (T, D) in the format of `out_RD`.

    Raises:
        KernelError: an argument does not fit the others.
    """
    checks.rank("out_RD", out_RD, "R, D")
    checks.rank("weights_TK", weights_TK, "T, K")
    checks.one_of("out_RD", out_RD, checks.FLOATS)
    checks.contiguous_rows("out_RD", out_RD)
    num_tokens, k = weights_TK.shape
    because = f"weights_TK {checks.describe(weights_TK)}"
    checks.memory("row_of_N", row_of_N, (num_tokens * k,), torch.int64, because)
    checks.same_device(
        out_RD=out_RD, weights_TK=weights_TK, row_of_N=row_of_N, num_rows=num_rows, out=out
    )
    if num_rows is not None:
        checks.memory("num_rows", num_rows, (1,), torch.int64, "the one number R")
    width = out_RD.shape[1]
    if out is None:
        out = out_RD.new_empty(num_tokens, width)
    else:
        because = f"out_RD {checks.describe(out_RD)} and {because}"
        checks.memory("out", out, (num_tokens, width), out_RD.dtype, because)
    if num_tokens == 0:
        return out
    block = _block(width)
    _combine[(num_tokens, triton.cdiv(width, block))](
        out_RD, weights_TK, row_of_N, num_rows, out, out_RD.shape[0], out_RD.stride(0),
        *weights_TK.stride(), D=width, K=k, BLOCK=block, num_warps=_warps(block),
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _block(width: int) -> int:
    return min(1024, max(16, int(triton.next_power_of_2(width))))


def _warps(block: int) -> int:
    return 4 if block > 256 else 1


@triton.jit(do_not_specialize=["capacity"])
def _combine(
    rows_ptr, weights_ptr, row_of_ptr, num_rows_ptr, out_ptr, capacity, stride_r, stride_t,
    stride_k, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add up one token's rows over one piece of the width."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < D
    num_rows = capacity
    if num_rows_ptr is not None:
        num_rows = tl.minimum(tl.load(num_rows_ptr), capacity)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(K):
        row = tl.load(row_of_ptr + token * K + slot)
        weight = tl.load(weights_ptr + token * stride_t + slot * stride_k).to(tl.float32)
        at = rows_ptr + row * stride_r + columns
        value = tl.load(at, mask=inside & (row >= 0) & (row < num_rows), other=0.0)
        value = value.to(tl.float32)
        if slot == 0:
            total = value * weight
        else:
            total += value * weight
    tl.store(out_ptr + token * D + columns, narrow(total, out_ptr.dtype.element_ty), mask=inside)


def variants() -> tuple[Variant, ...]:
    """Return what is compiled for a device: each format, whole and masked widths."""
    return tuple(
        Variant(
            name=f"combine.{dtype}.{width}x{k}",
            kernel=_combine,
            signature={
                "rows_ptr": f"*{dtype}",
                "weights_ptr": "*fp32",
                "row_of_ptr": "*i64",
                "num_rows_ptr": "*i64",
                "out_ptr": f"*{dtype}",
                "capacity": "i32",
                "stride_r": "i32",
                "stride_t": "i32",
                "stride_k": "constexpr",
                "D": "constexpr",
                "K": "constexpr",
                "BLOCK": "constexpr",
            },
            constexprs={"stride_k": 1, "D": width, "K": k, "BLOCK": _block(width)},
            aligned=("stride_r",) if width % 16 == 0 else (),
            num_warps=_warps(_block(width)),
            fp_fusion=False,
            dtype=dtype,
        )
        for dtype in ("bf16", "fp16", "fp32")
        for width, k in ((4096, 8), (1000, 3))
    )
