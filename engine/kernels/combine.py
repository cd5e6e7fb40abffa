"""Bring the experts' rows home and add them up, weighted, in a fixed order.

Called by the dispatchers in `engine.exchange`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def combine(out_RD: Tensor, weights_TK: Tensor, row_of_N: Tensor) -> Tensor:
    """Sum each token's K expert outputs: ``y_t = w_t0 * out[row_t0] + w_t1 * out[row_t1] + …``.

    Accumulates in fp32, slot 0 first, product and sum rounded separately, so that a token's result
    depends on nothing but its own rows.

    Args:
        out_RD: (R, D) experts' outputs ordered by expert.
        weights_TK: (T, K) fp32 routing weights.
        row_of_N: (T·K,) int64 row of each pair; R (one past the end) adds nothing.

    Returns:
        (T, D) in the format of `out_RD`.
    """
    num_tokens, k = weights_TK.shape
    if out_RD.shape[0] < row_of_N.numel():
        out_RD = torch.cat((out_RD, out_RD.new_zeros(1, out_RD.shape[1])))
    gathered_TKD = out_RD.index_select(0, row_of_N).view(num_tokens, k, out_RD.shape[1])
    products_TKD = gathered_TKD.float() * weights_TK.unsqueeze(-1)
    y_TD = products_TKD[:, 0]
    for slot in range(1, k):
        y_TD = y_TD + products_TKD[:, slot]
    return y_TD.to(out_RD.dtype)
