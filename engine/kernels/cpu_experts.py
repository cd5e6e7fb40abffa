"""The experts on a CPU: three layouts of their weights, each fast for some sizes.

| path | weights | fastest for | memory beside the weights |
|---|---|---|---|
| `columns` | the transpose in memory, a view | fp32, small matrices | none |
| `packed` | oneDNN's blocks | bf16; large fp32 matrices | the same again |
| `int8` | oneDNN's int8 blocks, scales | few rows, large matrices | a byte a weight |

All loop over the experts that have rows: two products for each, nothing else in Python. The shapes
that oneDNN sees are few, because it compiles a kernel of about a millisecond for each new one.
What the functions take and refuse is what `grouped_gemm.grouped_mlp` does. Called by
`engine.model.moe` through the registry.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import checks, onednn
from engine.kernels.dense import by_columns
from engine.kernels.experts import ExpertWeights, Matrix, Prepared
from engine.kernels.grouped_gemm import mlp
from engine.kernels.quant import SMALLEST_SCALE, quantise_experts

FEW_ROWS = 4
"""From this many rows on a packed fp32 matrix is faster than one read as it is."""


def prepare_columns(gate_up: Tensor, down: Tensor) -> Prepared:
    """Lay each matrix out by columns, in place of what was there, and return views (I, O).

    The parameters keep shape and values; only their strides change.
    """
    for stack in (gate_up, down):
        stack.data = by_columns(stack.data)
    return [
        (Matrix(up.t(), None, 0), Matrix(out.t(), None, 0))
        for up, out in zip(gate_up.data, down.data, strict=True)
    ]


def columns_mlp(
    rows_RD: Tensor, counts: Sequence[int], experts: Sequence[int], weights: ExpertWeights
) -> Tensor:
    """Run each group of rows through its expert, as `grouped_gemm.grouped_mlp` does.

    All groups' products go into one array, so that SiLU and product run once.
    """
    checks.groups(rows_RD, counts, experts, weights.gate_up)
    groups = [(n, weights.of(e)) for n, e in zip(counts, experts, strict=True) if n]
    out_RD = torch.empty_like(rows_RD, memory_format=torch.contiguous_format)
    if not groups:
        return out_RD
    sizes = [count for count, _ in groups]
    hidden = rows_RD.new_empty(rows_RD.shape[0], weights.gate_up.shape[1])
    for x, h, (_, (matrix, _)) in zip(
        torch.split(rows_RD, sizes), torch.split(hidden, sizes), groups, strict=True
    ):
        torch.mm(x, matrix.values, out=h)
    activated_RF = swiglu(hidden)
    for h, y, (_, (_, matrix)) in zip(
        torch.split(activated_RF, sizes), torch.split(out_RD, sizes), groups, strict=True
    ):
        torch.mm(h, matrix.values, out=y)
    return out_RD


def prepare_packed(gate_up: Tensor, down: Tensor) -> Prepared:
    """Copy each matrix into oneDNN's blocked layout.

    Raises:
        KernelError: the weights are neither fp32 nor bf16.
    """
    checks.one_of("gate_up", gate_up, (torch.float32, torch.bfloat16))
    return [(_pack(up), _pack(out)) for up, out in zip(gate_up.data, down.data, strict=True)]


def packed_mlp(
    rows_RD: Tensor, counts: Sequence[int], experts: Sequence[int], weights: ExpertWeights
) -> Tensor:
    """Run each group of rows through its expert, as `grouped_gemm.grouped_mlp` does.

    Groups of few fp32 rows read the weights as they are, which is faster then.
    """
    checks.groups(rows_RD, counts, experts, weights.gate_up)
    rows_RD = rows_RD.contiguous()
    few = FEW_ROWS if rows_RD.dtype == torch.float32 else 0
    outputs = []
    for expert, window, own in _windows(counts, experts, rows_RD.shape[0]):
        if window.stop - window.start < few:
            plain = weights.gate_up[expert], weights.down[expert]
            outputs.append(mlp(rows_RD[window], *plain)[own])
            continue
        gate_up, down = weights.of(expert)
        hidden = onednn.linear(rows_RD[window], gate_up.values)
        outputs.append(onednn.linear(swiglu(hidden), down.values)[own])
    return _joined(outputs, rows_RD)


def prepare_int8(gate_up: Tensor, down: Tensor) -> Prepared:
    """Quantise each matrix with one scale an output channel, and pack its values for oneDNN."""
    quantised = quantise_experts(gate_up.data, down.data, "int8")
    return [
        (_pack_int8(*up), _pack_int8(*out))
        for up, out in zip(
            zip(quantised.gate_up.values, quantised.gate_up.scales, strict=True),
            zip(quantised.down.values, quantised.down.scales, strict=True),
            strict=True,
        )
    ]


def int8_mlp(
    rows_RD: Tensor, counts: Sequence[int], experts: Sequence[int], weights: ExpertWeights
) -> Tensor:
    """Run each group of rows through its expert in int8: W8A8, one scale a row and a channel.

    Rows are quantised as they come, once before each product; sums are int32, everything between
    the products fp32. A row that is not finite comes out not finite.
    """
    checks.groups(rows_RD, counts, experts, weights.gate_up)
    num_rows = rows_RD.shape[0]
    if num_rows == 1:  # oneDNN compiles its kernel for one row again at every call
        return int8_mlp(rows_RD.expand(2, -1), [2 * n for n in counts], experts, weights)[:1]
    values_RD, scales_R1 = _quantise(rows_RD.float())
    outputs = []
    for expert, window, own in _windows(counts, experts, num_rows, least=2):
        gate_up, down = weights.of(expert)
        hidden = _int8_product(values_RD[window], scales_R1[window], gate_up)
        activated, scales = _quantise(swiglu(hidden))
        outputs.append(_int8_product(activated, scales, down)[own])
    return _joined(outputs, rows_RD).to(rows_RD.dtype)


def swiglu(hidden: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` of (R, 2F); (R, F)."""
    gate, up = hidden.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _windows(
    counts: Sequence[int], experts: Sequence[int], num_rows: int, least: int = 1
) -> Iterator[tuple[int, slice, slice]]:
    """Yield for each group with rows its expert, the rows to run, and where its own lie in them.

    Windows have the sizes of `onednn.size_class`, so they may reach into a neighbour's rows, which
    are then run for nothing; at the end they begin earlier instead. Counts ``[1, 17, 4]`` over 22
    rows give ``[0:1]`` of ``[0:1]``, ``[1:19]`` of which ``[0:17]`` count, and ``[18:22]``.
    """
    start = 0
    for count, expert in zip(counts, experts, strict=True):
        if count == 0:
            continue
        size = min(max(onednn.size_class(count), least), num_rows)
        first = min(start, num_rows - size)
        yield expert, slice(first, first + size), slice(start - first, start - first + count)
        start += count


def _joined(outputs: list[Tensor], like_RD: Tensor) -> Tensor:
    return torch.cat(outputs) if outputs else torch.empty_like(like_RD)


def _pack(matrix_OI: Tensor) -> Matrix:
    num_bytes = matrix_OI.numel() * matrix_OI.element_size()
    return Matrix(onednn.pack(matrix_OI), None, num_bytes)


def _pack_int8(values_OI: Tensor, scales_O: Tensor) -> Matrix:
    num_bytes = values_OI.numel() + 4 * scales_O.numel()
    return Matrix(onednn.pack_int8(values_OI), scales_O, num_bytes)


def _int8_product(values: Tensor, scales_R1: Tensor, matrix: Matrix) -> Tensor:
    """Multiply int8 rows by an int8 matrix and scale both away; fp32."""
    assert matrix.scales_O is not None, "the matrix was not quantised"
    return onednn.linear_int8(values, matrix.values, matrix.scales_O).mul_(scales_R1)


def _quantise(wide_RD: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `quant.quantise_rows` does for finite rows, with fewer passes, scales (R, 1)."""
    scales_R1 = wide_RD.abs().amax(-1, keepdim=True).div_(127.0).clamp_min_(SMALLEST_SCALE)
    return (wide_RD / scales_R1).round_().to(torch.int8), scales_R1
