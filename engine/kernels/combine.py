"""Bring the experts' rows home and add them up, weighted, in a fixed order.

Called by the dispatchers in `engine.exchange`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.errors import KernelError
from engine.kernels import checks


def combine(out_RD: Tensor, weights_TK: Tensor, row_of_N: Tensor) -> Tensor:
    """Sum each token's K expert outputs: ``y_t = w_t0 * out[row_t0] + w_t1 * out[row_t1] + …``.

    Accumulates in fp32, slot 0 first, product and sum rounded separately, so that a token's result
    depends on nothing but its own rows.

    Args:
        out_RD: (R, D) experts' outputs ordered by expert, fp32, bf16 or fp16.
        weights_TK: (T, K) fp32 routing weights, K at least 1.
        row_of_N: (T·K,) int64 row of each pair; R (one past the end) adds nothing.

    Returns:
        (T, D) in the format of `out_RD`.

    Raises:
        KernelError: an argument does not fit the others, or a row is not 0 to R.
    """
    _check(out_RD, weights_TK, row_of_N)
    num_tokens, k = weights_TK.shape
    gathered_TKD = _gather(out_RD, row_of_N).view(num_tokens, k, out_RD.shape[1])
    slots = gathered_TKD.float().mul_(weights_TK.unsqueeze(-1)).unbind(1)
    y_TD = slots[0] if k == 1 else slots[0] + slots[1]
    for product_TD in slots[2:]:
        y_TD += product_TD
    return y_TD.to(out_RD.dtype)


def _check(out_RD: Tensor, weights_TK: Tensor, row_of_N: Tensor) -> None:
    checks.rank("out_RD", out_RD, "R, D")
    checks.one_of("out_RD", out_RD, checks.FLOATS)
    checks.rank("weights_TK", weights_TK, "T, K")
    checks.one_of("weights_TK", weights_TK, (torch.float32,))
    checks.rank("row_of_N", row_of_N, "N")
    checks.one_of("row_of_N", row_of_N, (torch.int64,))
    num_tokens, k = weights_TK.shape
    if k < 1:
        raise KernelError(f"weights_TK is {checks.describe(weights_TK)} but K must be at least 1.")
    if row_of_N.shape[0] != num_tokens * k:
        because = f"weights_TK {checks.describe(weights_TK)}"
        checks.shape("row_of_N", row_of_N, (num_tokens * k,), because)
    if not out_RD.device == weights_TK.device == row_of_N.device:
        checks.same_device(out_RD=out_RD, weights_TK=weights_TK, row_of_N=row_of_N)


def _gather(out_RD: Tensor, row_of_N: Tensor) -> Tensor:
    """Return (N, D) the row of each pair, zeros for row R.

    On a CPU torch itself looks at every row number, so the range is not checked twice.
    """
    num_rows, on_cpu = out_RD.shape[0], out_RD.device.type == "cpu"
    if on_cpu and num_rows >= row_of_N.shape[0]:
        try:
            return out_RD.index_select(0, row_of_N)
        except IndexError:  # row R, or one that is wrong
            pass
    checks.has_values("row_of_N", row_of_N)
    padded = torch.cat((out_RD, out_RD.new_zeros(1, out_RD.shape[1])))
    if not on_cpu:
        _refuse_rows(out_RD, row_of_N)
    try:
        return padded.index_select(0, row_of_N)
    except IndexError:
        _refuse_rows(out_RD, row_of_N)
        raise


def _refuse_rows(out_RD: Tensor, row_of_N: Tensor) -> None:
    """Raise if a row is not 0 to R; reads the values."""
    wrong_N = (row_of_N < 0) | (row_of_N > out_RD.shape[0])
    if bool(wrong_N.any()):
        raise KernelError(
            f"row_of_N {checks.describe(row_of_N)} holds the row {int(row_of_N[wrong_N][0])} but "
            f"out_RD {checks.describe(out_RD)} allows 0 to {out_RD.shape[0]}."
        )
