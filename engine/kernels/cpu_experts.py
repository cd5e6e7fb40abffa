"""The experts on a CPU: three layouts of their weights, each fast for some sizes.

| path | weights | fastest for | memory beside the weights |
|---|---|---|---|
| `columns` | the transpose in memory, a view | fp32, small matrices | none |
| `packed` | oneDNN's blocks | bf16; large fp32 matrices | the same again |
| `int8` | oneDNN's int8 blocks, scales | few rows, large matrices | a byte a weight |

All loop over the experts that have rows, once for each of the two products; what lies between them
runs once for many experts. The shapes that oneDNN sees are few, because it compiles a kernel of
about a millisecond for each new one.
What the functions take and refuse is what `grouped_gemm.grouped_mlp` does. Called by
`engine.model.moe` through the registry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import checks, onednn
from engine.kernels.dense import by_columns
from engine.kernels.experts import ExpertWeights, Matrix, Prepared
from engine.kernels.quant import SMALLEST_SCALE, quantise_experts

_Window = tuple[int, slice, slice]
"""An expert, the rows to run, and where its own lie in them."""
RUN_ROWS = 256
"""Rows whose hidden values, of a few thousand numbers each, still lie in a core's own cache."""
FEW_ROWS, FEW_HALF_ROWS = 4, 8
"""From this many rows on a packed matrix, of fp32 or of bf16, is faster than the fp32 one."""
WIDENED = 1 << 17
"""bf16 matrices of up to this many values are kept in fp32 as well: a call of oneDNN, which takes
some 25 microseconds, costs more than to read twice the bytes."""


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
    checks.no_gradient(rows_RD=rows_RD, gate_up=weights.gate_up, down=weights.down)
    groups = [(n, weights.of(e)) for n, e in zip(counts, experts, strict=True) if n]
    out_RD = torch.empty_like(rows_RD, memory_format=torch.contiguous_format)
    if not groups:
        return out_RD
    sizes = [count for count, _ in groups]
    hidden = rows_RD.new_empty(rows_RD.shape[0], weights.gate_up.shape[1])
    for x, h, (_, (matrix, _)) in zip(
        rows_RD.split_with_sizes(sizes), hidden.split_with_sizes(sizes), groups, strict=True
    ):
        torch.mm(x, matrix.values, out=h)
    activated_RF = swiglu(hidden)
    for h, y, (_, (_, matrix)) in zip(
        activated_RF.split_with_sizes(sizes), out_RD.split_with_sizes(sizes), groups, strict=True
    ):
        torch.mm(h, matrix.values, out=y)
    return out_RD


def prepare_packed(gate_up: Tensor, down: Tensor) -> Prepared:
    """Copy each matrix into oneDNN's blocked layout, and keep it in fp32 for few rows.

    Raises:
        KernelError: the weights are neither fp32 nor bf16.
    """
    checks.one_of("gate_up", gate_up, (torch.float32, torch.bfloat16))
    return [(_pack(up), _pack(out)) for up, out in zip(gate_up.data, down.data, strict=True)]


def packed_mlp(
    rows_RD: Tensor, counts: Sequence[int], experts: Sequence[int], weights: ExpertWeights
) -> Tensor:
    """Run each group of rows through its expert, as `grouped_gemm.grouped_mlp` does.

    Groups of few rows multiply fp32 weights, which is faster then: those that are there, or for
    small bf16 matrices a widened copy. What comes out of a product is in the rows' format.
    """
    checks.groups(rows_RD, counts, experts, weights.gate_up)
    checks.no_gradient(rows_RD=rows_RD, gate_up=weights.gate_up, down=weights.down)
    rows_RD = rows_RD.contiguous()
    few = FEW_ROWS if rows_RD.dtype == torch.float32 else FEW_HALF_ROWS

    def product(rows: Tensor, which: int, windows: list[_Window]) -> Tensor:
        parts = []
        for expert, window, own in windows:
            matrix = weights.of(expert)[which]
            if matrix.wide is not None and window.stop - window.start < few:
                parts.append(torch.mm(rows[window].float(), matrix.wide)[own].to(rows.dtype))
            else:
                parts.append(onednn.linear(rows[window], matrix.values)[own])
        return torch.cat(parts)

    def mlp(rows: Tensor, counts: Sequence[int], experts: Sequence[int]) -> Tensor:
        windows = list(_windows(counts, experts, rows.shape[0]))
        return product(swiglu(product(rows, 0, windows)), 1, windows)

    return _by_runs(mlp, rows_RD, counts, experts)


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

    Rows are quantised as they come, many at a time before each of the two products; sums are int32,
    everything between the products fp32. A row that is not finite comes out not finite.
    """
    checks.groups(rows_RD, counts, experts, weights.gate_up)
    checks.no_gradient(rows_RD=rows_RD, gate_up=weights.gate_up, down=weights.down)

    def product(rows: Tensor, which: int, windows: list[_Window]) -> Tensor:
        values, scales_R1 = _quantise(rows)
        parts = []
        for expert, window, own in windows:
            matrix = weights.of(expert)[which]
            assert matrix.scales_O is not None, "the matrix was not quantised"
            out = onednn.linear_int8(values[window], matrix.values, matrix.scales_O)
            parts.append(out[own])
        return torch.cat(parts).mul_(scales_R1)

    def mlp(rows: Tensor, counts: Sequence[int], experts: Sequence[int]) -> Tensor:
        if len(rows) == 1:  # oneDNN compiles its kernel for one row again at every call
            return mlp(rows.expand(2, -1), [2 * n for n in counts], experts)[:1]
        windows = list(_windows(counts, experts, len(rows), least=2))
        hidden = product(rows.float(), 0, windows)
        return product(swiglu(hidden), 1, windows).to(rows.dtype)

    return _by_runs(mlp, rows_RD, counts, experts)


def swiglu(hidden: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` of (R, 2F); (R, F)."""
    gate, up = hidden.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _by_runs(
    mlp: Callable[[Tensor, Sequence[int], Sequence[int]], Tensor],
    rows_RD: Tensor,
    counts: Sequence[int],
    experts: Sequence[int],
) -> Tensor:
    """Run neighbouring groups together, as many as make `RUN_ROWS` rows; one group at least.

    What lies between the products is then one call for many small experts, and of a size that stays
    in the cache for large ones. Counts ``[1, 0, 200, 100, 300]`` make the runs ``[1, 200]``,
    ``[100]`` and ``[300]``.
    """
    outputs: list[Tensor] = []
    run: list[tuple[int, int]] = []
    start = end = 0
    for count, expert in [*zip(counts, experts, strict=True), (RUN_ROWS + 1, -1)]:
        if run and end - start + count > RUN_ROWS:
            outputs.append(mlp(rows_RD[start:end], *zip(*run, strict=True)))
            run, start = [], end
        if count:
            run.append((count, expert))
            end += count
    return torch.cat(outputs) if outputs else torch.empty_like(rows_RD)


def _windows(
    counts: Sequence[int], experts: Sequence[int], num_rows: int, least: int = 1
) -> Iterator[_Window]:
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


def _pack(matrix_OI: Tensor) -> Matrix:
    num_bytes, wide = matrix_OI.numel() * matrix_OI.element_size(), None
    if matrix_OI.dtype == torch.float32:
        wide = matrix_OI.t()
    elif matrix_OI.numel() <= WIDENED:
        wide = by_columns(matrix_OI.float()).t()
        num_bytes += 4 * matrix_OI.numel()
    return Matrix(onednn.pack(matrix_OI), None, num_bytes, wide)


def _pack_int8(values_OI: Tensor, scales_O: Tensor) -> Matrix:
    num_bytes = values_OI.numel() + 4 * scales_O.numel()
    return Matrix(onednn.pack_int8(values_OI), scales_O, num_bytes)


def _quantise(wide_RD: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `quant.quantise_rows` does for finite rows, with fewer passes, scales (R, 1)."""
    scales_R1 = wide_RD.abs().amax(-1, keepdim=True).div_(127.0).clamp_min_(SMALLEST_SCALE)
    return (wide_RD / scales_R1).round_().to(torch.int8), scales_R1
