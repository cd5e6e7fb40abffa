"""The experts on a CPU: three paths, each fast for some formats and sizes.

| path | weights | for | memory beside the weights |
|---|---|---|---|
| `columns` | the transpose in memory, a view | fp32, small matrices | none |
| `packed` | oneDNN's blocks, for few rows another way | bf16; large fp32 matrices | once or more |
| `int8` | int8 values and scales | few rows, large matrices | a byte a weight |

Which of its `ways` a path takes for how many rows is measured when the weights are prepared, or
follows a fixed rule. All loop over the experts that have rows, once for each of the two products;
what lies between them runs once for many experts. The shapes that oneDNN sees are few, because it
compiles a kernel of about a millisecond for each new one.
What the functions take and refuse is what `grouped_gemm.grouped_mlp` does. Called by
`engine.model.moe` through the registry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import checks, onednn, trials, ways
from engine.kernels.dense import by_columns
from engine.kernels.experts import ExpertWeights, Matrix, Prepared
from engine.kernels.quant import SMALLEST_SCALE, quantise_experts
from engine.kernels.ways import Plan

_Window = tuple[int, slice, slice]
"""An expert, the rows to run, and where its own lie in them."""
RUN_ROWS = 256
"""Rows whose hidden values, of a few thousand numbers each, still lie in a core's own cache."""


def prepare_columns(gate_up: Tensor, down: Tensor) -> Prepared:
    """Lay each matrix out by columns, in place of what was there, and return views (I, O).

    The parameters keep shape and values; only their strides change.
    """
    for stack in (gate_up, down):
        stack.data = by_columns(stack.data)
    return [
        (Matrix(None, columns=up.t()), Matrix(None, columns=out.t()))
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
    groups = [(n, _columns_of(weights, e)) for n, e in zip(counts, experts, strict=True) if n]
    out_RD = torch.empty_like(rows_RD, memory_format=torch.contiguous_format)
    if not groups:
        return out_RD
    sizes = [count for count, _ in groups]
    hidden = rows_RD.new_empty(rows_RD.shape[0], weights.gate_up.shape[1])
    for x, h, (_, (up_DF, _)) in zip(
        rows_RD.split_with_sizes(sizes), hidden.split_with_sizes(sizes), groups, strict=True
    ):
        torch.mm(x, up_DF, out=h)
    activated_RF = swiglu(hidden)
    for h, y, (_, (_, down_FD)) in zip(
        activated_RF.split_with_sizes(sizes), out_RD.split_with_sizes(sizes), groups, strict=True
    ):
        torch.mm(h, down_FD, out=y)
    return out_RD


def _columns_of(weights: ExpertWeights, expert: int) -> tuple[Tensor, Tensor]:
    up, out = weights.of(expert)
    assert up.columns is not None and out.columns is not None, "prepared for another path"
    return up.columns, out.columns


def prepare_packed(gate_up: Tensor, down: Tensor, *, measure: bool = False) -> Prepared:
    """Copy each matrix into oneDNN's blocked layout, and for few rows whatever is faster then.

    fp32 parameters are laid out by columns, in place; they keep shape and values.

    Args:
        gate_up: (E, 2F, D).
        down: (E, D, F).
        measure: whether to try the ways out, in some tenths of a second a process and size; else a
            fixed rule says which to take.

    Raises:
        KernelError: the weights are neither fp32 nor bf16.
    """
    checks.one_of("gate_up", gate_up, (torch.float32, torch.bfloat16))
    prepared = []
    for stack in (gate_up, down):
        if stack.dtype == torch.float32:
            stack.data = by_columns(stack.data)
        plan = _plan(stack, measure)
        prepared.append([_ready(matrix_OI, None, plan) for matrix_OI in stack.data])
    return list(zip(*prepared, strict=True))


def packed_mlp(
    rows_RD: Tensor, counts: Sequence[int], experts: Sequence[int], weights: ExpertWeights
) -> Tensor:
    """Run each group of rows through its expert, as `grouped_gemm.grouped_mlp` does.

    Some ways multiply wider numbers than the weights' own; what comes out of a product is in the
    rows' format.
    """
    checks.groups(rows_RD, counts, experts, weights.gate_up)
    checks.no_gradient(rows_RD=rows_RD, gate_up=weights.gate_up, down=weights.down)

    def mlp(rows: Tensor, counts: Sequence[int], experts: Sequence[int]) -> Tensor:
        windows = list(_windows(counts, experts, rows.shape[0]))
        hidden = _multiply(rows, windows, 0, weights)
        return _multiply(swiglu(hidden), windows, 1, weights)

    return _by_runs(mlp, rows_RD.contiguous(), counts, experts)


def prepare_int8(gate_up: Tensor, down: Tensor, *, measure: bool = False) -> Prepared:
    """Quantise each matrix with one scale an output channel, and lay its values out for products.

    `measure` is that of `prepare_packed`.
    """
    quantised = quantise_experts(gate_up.data, down.data, "int8")
    prepared = []
    for stack in (quantised.gate_up, quantised.down):
        plan = _plan(stack.values, measure)
        pairs = zip(stack.values, stack.scales, strict=True)
        prepared.append([_ready(values_OI, scales_O, plan) for values_OI, scales_O in pairs])
    return list(zip(*prepared, strict=True))


def int8_mlp(
    rows_RD: Tensor, counts: Sequence[int], experts: Sequence[int], weights: ExpertWeights
) -> Tensor:
    """Run each group of rows through its expert in int8: W8A8, one scale a row and a channel.

    Rows are quantised as they come, many at a time before each of the two products; sums are int32,
    everything between the products fp32. A row that is not finite comes out not finite.
    """
    checks.groups(rows_RD, counts, experts, weights.gate_up)
    checks.no_gradient(rows_RD=rows_RD, gate_up=weights.gate_up, down=weights.down)

    def mlp(rows: Tensor, counts: Sequence[int], experts: Sequence[int]) -> Tensor:
        windows = list(_windows(counts, experts, rows.shape[0]))
        values, scales_R1 = _quantise(rows.float())
        hidden = _multiply(values, windows, 0, weights).mul_(scales_R1)
        values, scales_R1 = _quantise(swiglu(hidden))
        return _multiply(values, windows, 1, weights).mul_(scales_R1).to(rows.dtype)

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


def _windows(counts: Sequence[int], experts: Sequence[int], num_rows: int) -> Iterator[_Window]:
    """Yield for each group with rows its expert, the rows to run, and where its own lie in them.

    Windows have the sizes of `onednn.size_class`, so they may reach into a neighbour's rows, which
    are then run for nothing; at the end they begin earlier instead. Counts ``[1, 17, 4]`` over 22
    rows give ``[0:1]`` of ``[0:1]``, ``[1:19]`` of which ``[0:17]`` count, and ``[18:22]``.
    """
    start = 0
    for count, expert in zip(counts, experts, strict=True):
        if count == 0:
            continue
        size = min(onednn.size_class(count), num_rows)
        first = min(start, num_rows - size)
        yield expert, slice(first, first + size), slice(start - first, start - first + count)
        start += count


def _multiply(rows: Tensor, windows: list[_Window], which: int, weights: ExpertWeights) -> Tensor:
    """Multiply each window's rows by its expert's first or second matrix."""
    parts = []
    for expert, window, own in windows:
        matrix = weights.of(expert)[which]
        few = window.stop - window.start < matrix.limit
        product = matrix.few if few else matrix.product
        assert product is not None, "the matrix was prepared for another path"
        parts.append(product(rows[window])[own])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _plan(stack: Tensor, measure: bool) -> Plan:
    """Say how the matrices of a stack (E, O, I) are multiplied."""
    _, out, inner = stack.shape
    kind = str(stack.dtype).removeprefix("torch.")
    plan = trials.plan(kind, out, inner) if measure else ways.fixed(kind, out * inner)
    if "half" in plan[:2] and not ways.fits_fp16(stack):
        return ways.fixed(kind, out * inner)
    return plan


def _ready(matrix_OI: Tensor, scales_O: Tensor | None, plan: Plan) -> Matrix:
    kind = str(matrix_OI.dtype).removeprefix("torch.")
    main = ways.named(kind, plan.main).make(matrix_OI, scales_O)
    if plan.few is None:
        return Matrix(main.product, main.num_bytes)
    few = ways.named(kind, plan.few).make(matrix_OI, scales_O)
    return Matrix(main.product, main.num_bytes + few.num_bytes, few.product, plan.limit)


def _quantise(wide_RD: Tensor) -> tuple[Tensor, Tensor]:
    """Return what `quant.quantise_rows` does for finite rows, with fewer passes, scales (R, 1)."""
    scales_R1 = wide_RD.abs().amax(-1, keepdim=True).div_(127.0).clamp_min_(SMALLEST_SCALE)
    return (wide_RD / scales_R1).round_().to(torch.int8), scales_R1
