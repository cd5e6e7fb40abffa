# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""What several kernels share: conversions that hold on a device and in the interpreter alike.

Triton's interpreter (`TRITON_INTERPRET=1`) computes bf16 wrongly, truncates where the device rounds
to nearest even, and does not saturate e4m3. Kernels therefore widen what they load, compute in fp32
and narrow at the store, with these helpers. Called by the kernels beside this file.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _probe():
    pass


INTERPRETED = tl.constexpr(not isinstance(_probe, triton.JITFunction))
"""Whether kernels of this process run in the interpreter; known when they are decorated."""


@triton.jit
def round_to_integer(x):
    """Round fp32 of magnitude up to 2**22 to the nearest integer, halves to even.

    Adding 1.5 * 2**23 leaves no bit for a fraction; the hardware's rounding does the rest.
    """
    return (x + 12582912.0) - 12582912.0


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Convert fp32 to `dtype`, rounding to nearest even; e4m3 must already lie within ±448."""
    if INTERPRETED:
        if dtype == tl.bfloat16:
            return _round_mantissa(x, 16).to(tl.bfloat16)
        if dtype == tl.float8e4nv:
            # Below 2**-6 e4m3 has steps of 2**-9: 1.5 * 2**14 leaves no bit finer than that.
            steps = (x + 24576.0) - 24576.0
            return tl.where(tl.abs(x) < 0.015625, steps, _round_mantissa(x, 20)).to(dtype)
    return x.to(dtype)


@triton.jit
def _round_mantissa(x, dropped: tl.constexpr):
    """Round fp32 so that its lowest `dropped` bits are zero, halves to even; keep NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = bits + ((1 << (dropped - 1)) - 1) + ((bits >> dropped) & 1)
    kept = (rounded >> dropped) << dropped
    return tl.where(x == x, kept, bits | 0x00400000).to(tl.float32, bitcast=True)
