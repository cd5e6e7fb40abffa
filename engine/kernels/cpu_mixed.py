"""The experts on a CPU, row by row in their own format or in int8, in one call.

The rows of each format are gathered and go through their experts together, so it costs two runs of
each expert that has rows of both, however often formats change from row to row. A row's result does
not depend on the formats of the others: rows in their own format are equal, bit for bit, to what
`packed_mlp` makes of all rows, int8 rows to what `int8_mlp` makes of all. Called by
`engine.model.moe` through the registry; a GPU's kernel, `gpu.grouped_gemm`, takes formats too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.errors import KernelError
from engine.kernels import checks
from engine.kernels.cpu_experts import int8_mlp, packed_mlp, prepare_int8, prepare_packed
from engine.kernels.experts import ExpertWeights, Matrix, Prepared
from engine.kernels.quant import INT8, NATIVE, SKIP

_Bool = npt.NDArray[np.bool_]


def prepare_mixed(gate_up: Tensor, down: Tensor) -> Prepared:
    """Lay each matrix out twice: first those of all E experts packed, then those of all in int8."""
    return [*prepare_packed(gate_up, down), *prepare_int8(gate_up, down)]


def mixed_mlp(
    rows_RD: Tensor,
    counts: Sequence[int],
    experts: Sequence[int],
    weights: ExpertWeights,
    formats_R: Tensor | None = None,
) -> Tensor:
    """Run each row through its expert in its format, otherwise as `grouped_gemm.grouped_mlp` does.

    Args:
        rows_RD: (R, D) rows ordered by group, in the weights' format.
        counts: rows of each group.
        experts: for each group the index of its weights.
        weights: of all experts, prepared by `prepare_mixed`.
        formats_R: (R,) int8, `quant.NATIVE`, `INT8`, or `SKIP` for a row that is not run and whose
            result means nothing. None runs all rows in their own format.

    Returns:
        (R, D) in the format of `rows_RD`.

    Raises:
        KernelError: rows, counts, experts, weights and formats do not fit one another.
    """
    checks.groups(rows_RD, counts, experts, weights.gate_up)
    own, int8 = _Side(weights, 0), _Side(weights, weights.gate_up.shape[0])
    if formats_R is None:
        return packed_mlp(rows_RD, counts, experts, own)
    formats = _checked(formats_R, rows_RD)
    is_own, is_int8 = formats == NATIVE, formats == INT8
    if is_own.all():
        return packed_mlp(rows_RD, counts, experts, own)
    if is_int8.all():
        return int8_mlp(rows_RD, counts, experts, int8)
    out_RD = torch.empty_like(rows_RD, memory_format=torch.contiguous_format)
    group_R = np.arange(len(counts)).repeat(counts)
    for run_R, mlp, side in (
        (_filled_up(is_own, group_R, counts, _few(own, experts)), packed_mlp, own),
        (is_int8, int8_mlp, int8),
    ):
        index = np.flatnonzero(run_R)
        if len(index):
            own_counts = np.bincount(group_R[index], minlength=len(counts)).tolist()
            index_S = torch.from_numpy(index)
            part_SD = mlp(rows_RD.index_select(0, index_S), own_counts, experts, side)
            out_RD.index_copy_(0, index_S, part_SD)
    return out_RD


class _Side(ExpertWeights):
    """One of the two formats of experts that are held in both, as the single paths read them."""

    def __init__(self, weights: ExpertWeights, first: int) -> None:
        self.gate_up, self.down = weights.gate_up, weights.down
        self._weights, self._first = weights, first

    def of(self, expert: int) -> tuple[Matrix, Matrix]:
        return self._weights.of(self._first + expert)


def _few(own: ExpertWeights, experts: Sequence[int]) -> int:
    """Return from how many rows on the packed path takes one way whatever their number."""
    return max((matrix.limit for matrix in own.of(experts[0])), default=0) if experts else 0


def _filled_up(
    wanted_R: _Bool, group_R: npt.NDArray[np.int64], counts: Sequence[int], few: int
) -> _Bool:
    """Let groups with few wanted rows run more of theirs for nothing, up to `few`.

    Below that the packed path takes another way, whose last bits are others than those of the whole
    group. Wanted rows ``[1, 0, 0]`` of a group of 3 with few = 8 become ``[1, 1, 1]``.
    """
    wanted = np.bincount(group_R[wanted_R], minlength=len(counts))
    least = np.minimum(few, counts)
    short = np.flatnonzero((wanted > 0) & (wanted < least))
    if not len(short):
        return wanted_R
    filled_R = wanted_R.copy()
    for group in short:
        others = np.flatnonzero((group_R == group) & ~wanted_R)
        filled_R[others[: least[group] - wanted[group]]] = True
    return filled_R


def _checked(formats_R: Tensor, rows_RD: Tensor) -> npt.NDArray[np.int8]:
    checks.one_of("formats_R", formats_R, (torch.int8,))
    checks.shape("formats_R", formats_R, (rows_RD.shape[0],), f"rows {checks.describe(rows_RD)}")
    formats: npt.NDArray[np.int8] = formats_R.cpu().numpy()
    if len(formats) and not SKIP <= formats.min() <= formats.max() <= INT8:
        raise KernelError(
            f"formats_R {checks.describe(formats_R)} holds {formats.min()} to {formats.max()} but "
            f"allowed are {SKIP} (not run), {NATIVE} (the rows' own) and {INT8} (int8)."
        )
    return formats
