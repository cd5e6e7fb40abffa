"""Kernels for the tests of the inspector: one that is right, and one for each way to be wrong."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.gpu.variant import Variant


@triton.jit
def product(
    a_ptr,
    b_ptr,
    c_ptr,
    rows,
    depth,
    stride_a,
    stride_b,
    stride_c,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    m = tl.program_id(0).to(stride_a.dtype) * M + tl.arange(0, M)
    n = tl.program_id(1).to(stride_b.dtype) * N + tl.arange(0, N)
    k = tl.arange(0, K)
    a = a_ptr + m[:, None] * stride_a + k[None, :]
    b = b_ptr + n[None, :] * stride_b + k[:, None]
    total = tl.zeros((M, N), tl.float32)
    kept = m[:, None] < rows
    for at in range(0, depth, K):
        total = tl.dot(
            tl.load(a + at, mask=kept, other=0.0),
            tl.load(b + at),
            total,
            input_precision=PRECISION,
        )
    tl.store(c_ptr + m[:, None] * stride_c + n[None, :], total, mask=kept)


@triton.jit
def centred(x_ptr, y_ptr, WIDTH: tl.constexpr):
    """Hold a whole row in the registers of one warp: 16384 elements do not fit."""
    i = tl.arange(0, WIDTH)
    x = tl.load(x_ptr + i)
    tl.store(y_ptr + i, x - tl.sum(x) / WIDTH)


@triton.jit
def gathered(x_ptr, ids_ptr, y_ptr, stride, WIDTH: tl.constexpr, WIDEN: tl.constexpr):
    """Multiply a loaded id by a stride, widened before or after."""
    row = tl.program_id(0)
    chosen = tl.load(ids_ptr + row)
    i = tl.arange(0, WIDTH)
    if WIDEN:
        x = tl.load(x_ptr + chosen.to(tl.int64) * stride + i)
    else:
        x = tl.load(x_ptr + (chosen * stride).to(tl.int64) + i)
    tl.store(y_ptr + row.to(tl.int64) * stride + i, x)


def product_variant(name: str = "product", **changes) -> Variant:
    dtype = changes.pop("operand", "bf16")
    stride = changes.pop("stride", "i64")
    sizes = {"M": 64, "N": 32, "K": 64, "PRECISION": "ieee"} | changes.pop("sizes", {})
    signature = {"a_ptr": f"*{dtype}", "b_ptr": f"*{dtype}", "c_ptr": "*fp32"}
    signature |= {"rows": "i32", "depth": "i32"}
    signature |= dict.fromkeys(("stride_a", "stride_b", "stride_c"), stride)
    signature |= dict.fromkeys(sizes, "constexpr")
    settings = {
        "dtype": "fp8" if dtype == "fp8e4nv" else dtype,
        "needs_tensor_cores": True,
        "min_capability": 90 if dtype == "fp8e4nv" else 80,
        "aligned": ("depth", "stride_a", "stride_b", "stride_c"),
    }
    return Variant(
        name=name, kernel=product, signature=signature, constexprs=sizes, **(settings | changes)
    )


def centred_variant(width: int) -> Variant:
    return Variant(
        name=f"centred.{width}",
        kernel=centred,
        signature={"x_ptr": "*fp32", "y_ptr": "*fp32", "WIDTH": "constexpr"},
        constexprs={"WIDTH": width},
        num_warps=1,
    )


def gathered_variant(widen: bool) -> Variant:
    signature = {"x_ptr": "*fp32", "ids_ptr": "*i32", "y_ptr": "*fp32", "stride": "i32"}
    return Variant(
        name=f"gathered.{widen}",
        kernel=gathered,
        signature=signature | {"WIDTH": "constexpr", "WIDEN": "constexpr"},
        constexprs={"WIDTH": 64, "WIDEN": widen},
        num_warps=1,
    )
