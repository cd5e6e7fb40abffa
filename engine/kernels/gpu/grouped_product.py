# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""The experts' grouped product: one block of rows by one tile of its expert's output channels.

Gate and up are multiplied side by side, with ``silu(gate) * up`` before the store. Called by
`engine.kernels.gpu.grouped_gemm`, which says what each argument is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.gpu.lang import INTERPRETED, narrow


@triton.jit(do_not_specialize=["num_blocks"])
def grouped_product(
    x_ptr, w_ptr, values_ptr, row_scales_ptr, w_values_ptr, w_scales_ptr, out_ptr,
    source_ptr, offsets_ptr, block_expert_ptr, block_row_ptr, block_unit_ptr, formats_ptr,
    stack_ptr, num_blocks,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, VALUES_STRIDE: tl.constexpr,
    GATED: tl.constexpr, NATIVE: tl.constexpr, ONE_BYTE: tl.constexpr,
    FORMAT: tl.constexpr, UNIT: tl.constexpr, TOKENS: tl.constexpr, FEATURES: tl.constexpr,
    TILE_DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Multiply one block of rows with one tile of their expert's output channels."""
    # 1. Which block and which channels: `GROUP` blocks walk over the channels together.
    pid = tl.program_id(0)
    tiles = tl.cdiv(WIDTH, FEATURES)
    first = pid // (GROUP * tiles) * GROUP
    size = tl.minimum(num_blocks - first, GROUP)
    within = pid % (GROUP * tiles)
    block = first + within % size
    expert = tl.load(block_expert_ptr + block)
    if expert < 0:
        return
    features = within // size * FEATURES + tl.arange(0, FEATURES)

    # 2. Rows and channels. Those past the end repeat the last one, so that every load is of real
    #    data and no value of the padding can reach a sum; they are not stored.
    start = tl.load(block_row_ptr + block)
    end = tl.load(offsets_ptr + expert + 1)
    rows = start + tl.arange(0, TOKENS)
    stored = (rows < end)[None, :] & (features < WIDTH)[:, None]
    rows = tl.minimum(rows, end - 1)
    source = rows
    if source_ptr is not None:
        source = tl.load(source_ptr + rows)
    slot = expert.to(tl.int64)
    if stack_ptr is not None:
        slot = tl.load(stack_ptr + expert).to(tl.int64)
    channels = tl.minimum(features, WIDTH - 1) + slot * (2 * WIDTH if GATED else WIDTH)
    out_at = out_ptr + rows[None, :] * WIDTH + features[:, None]

    # 3. One product, or one for each format that the block holds.
    if NATIVE and ONE_BYTE:
        unit = tl.load(block_unit_ptr + block) + ((rows - start) // UNIT).to(tl.int32)
        other = tl.load(formats_ptr + unit) == FORMAT
        num_other = tl.sum(other.to(tl.int32), axis=0)
        if num_other < TOKENS:
            gate, up = _accumulate(
                x_ptr, w_ptr, source, channels, DEPTH, WIDTH, STRIDE, GATED, TOKENS, FEATURES,
                TILE_DEPTH,
            )  # fmt: skip
            _finish(gate, up, out_at, stored & (other == 0)[None, :], GATED)
        if num_other > 0:
            gate, up = _accumulate(
                values_ptr, w_values_ptr, source, channels, DEPTH, WIDTH, VALUES_STRIDE, GATED,
                TOKENS, FEATURES, TILE_DEPTH,
            )  # fmt: skip
            gate, up = _scale(
                gate, up, row_scales_ptr, w_scales_ptr, source, channels, WIDTH, GATED
            )
            _finish(gate, up, out_at, stored & other[None, :], GATED)
    elif ONE_BYTE:
        gate, up = _accumulate(
            values_ptr, w_values_ptr, source, channels, DEPTH, WIDTH, VALUES_STRIDE, GATED, TOKENS,
            FEATURES, TILE_DEPTH,
        )  # fmt: skip
        gate, up = _scale(gate, up, row_scales_ptr, w_scales_ptr, source, channels, WIDTH, GATED)
        _finish(gate, up, out_at, stored, GATED)
    else:
        gate, up = _accumulate(
            x_ptr, w_ptr, source, channels, DEPTH, WIDTH, STRIDE, GATED, TOKENS, FEATURES,
            TILE_DEPTH,
        )  # fmt: skip
        _finish(gate, up, out_at, stored, GATED)


@triton.jit
def _accumulate(
    x_ptr, w_ptr, source, channels,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, GATED: tl.constexpr,
    TOKENS: tl.constexpr, FEATURES: tl.constexpr, TILE_DEPTH: tl.constexpr,
):  # fmt: skip
    """Return ``w[channels] @ x[source].T``, and with `GATED` that of the up channels.

    int8 adds up in int32, all others in fp32; without `GATED` the second result is not used.
    """
    SUM: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    EVEN: tl.constexpr = DEPTH % TILE_DEPTH == 0
    inner = tl.arange(0, TILE_DEPTH)
    x_at = x_ptr + source[None, :] * STRIDE + inner[:, None]
    gate_at = w_ptr + channels[:, None] * DEPTH + inner[None, :]
    gate_sum = tl.zeros((FEATURES, TOKENS), SUM)
    up_sum = tl.zeros((FEATURES, TOKENS), SUM)
    for done in range(0, DEPTH, TILE_DEPTH):
        if EVEN:
            x, gate = tl.load(x_at), tl.load(gate_at)
        else:
            x = tl.load(x_at, mask=inner[:, None] < DEPTH - done, other=0.0)
            gate = tl.load(gate_at, mask=inner[None, :] < DEPTH - done, other=0.0)
        gate_sum = _dot(gate, x, gate_sum, TILE_DEPTH)
        if GATED:
            up_at = gate_at + WIDTH * DEPTH
            if EVEN:
                up = tl.load(up_at)
            else:
                up = tl.load(up_at, mask=inner[None, :] < DEPTH - done, other=0.0)
            up_sum = _dot(up, x, up_sum, TILE_DEPTH)
        x_at += TILE_DEPTH
        gate_at += TILE_DEPTH
    return gate_sum, up_sum


@triton.jit
def _dot(weights, x, total, TILE_DEPTH: tl.constexpr):
    """Return ``total + weights @ x``; fp32 stays fp32 (the default would be tf32).

    Tensor cores of sm_90 add e4m3 products up in 14 bits, so each tile's sum is added in fp32.
    Source: DeepSeek-V3 (arXiv 2412.19437, section 3.3.2).
    """
    if x.dtype != tl.int8:
        if INTERPRETED:
            weights = weights.to(tl.float32)
            x = x.to(tl.float32)
        elif weights.dtype == tl.int8:
            weights = weights.to(x.dtype)
    return tl.dot(
        weights, x, total, input_precision="ieee", max_num_imprecise_acc=TILE_DEPTH,
        out_dtype=total.dtype,
    )  # fmt: skip


@triton.jit
def _scale(
    gate, up, row_scales_ptr, w_scales_ptr, source, channels,
    WIDTH: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Multiply sums of one-byte values by their channels' and, where there are, rows' scales."""
    gate = gate.to(tl.float32) * tl.load(w_scales_ptr + channels)[:, None]
    if GATED:
        up = up.to(tl.float32) * tl.load(w_scales_ptr + channels + WIDTH)[:, None]
    if row_scales_ptr is not None:
        scales = tl.load(row_scales_ptr + source)[None, :]
        gate *= scales
        if GATED:
            up *= scales
    return gate, up


@triton.jit
def _finish(gate, up, out_at, stored, GATED: tl.constexpr):
    """Store the sums, or ``silu(gate) * up``, in the format of the output."""
    out = gate
    if GATED:
        out = gate * tl.sigmoid(gate) * up
    tl.store(out_at, narrow(out, out_at.dtype.scalar.element_ty), mask=stored)
