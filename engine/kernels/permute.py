"""Order (token, slot) pairs by the expert that runs them, and find the way back.

Pure data movement: results are compared bitwise. Called by the dispatchers in `engine.exchange`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Permutation(NamedTuple):
    """How N = T·K pairs map to R rows ordered by expert (R = N minus the pairs with id -1)."""

    source_R: Tensor
    """(R,) int64 the token each row comes from."""
    row_of_N: Tensor
    """(N,) int64 the row of each (token, slot) pair, slot fastest; R for a pair with id -1."""
    counts: list[int]
    """(P,) rows of each physical expert."""


def permute(phy_ids_TK: Tensor, num_physical: int) -> Permutation:
    """Sort the pairs by physical expert; within one expert tokens keep their order.

    Ids ``[[1, 0], [1, -1]]`` over 2 experts give ``source_R = [0, 0, 1]``, ``row_of_N = [1, 0, 2,
    3]`` and ``counts = [1, 2]``: expert 0 gets token 0, expert 1 tokens 0 and 1.

    Args:
        phy_ids_TK: (T, K) int64, ids 0..num_physical-1 or -1 for "no expert", which is skipped.
        num_physical: P.
    """
    ids_N = phy_ids_TK.reshape(-1)
    order_N = torch.argsort(ids_N, stable=True)
    counts = torch.bincount(ids_N + 1, minlength=num_physical + 1).tolist()
    skipped, num_rows = counts[0], ids_N.numel() - counts[0]
    row_of_N = torch.empty_like(order_N)
    row_of_N[order_N[skipped:]] = torch.arange(num_rows, device=ids_N.device)
    if skipped:
        row_of_N[order_N[:skipped]] = num_rows
    source_R = order_N[skipped:].div(phy_ids_TK.shape[1], rounding_mode="floor")
    return Permutation(source_R, row_of_N, counts[1:])
