"""Order (token, slot) pairs by the expert that runs them, and find the way back.

Pure data movement: results are compared bitwise. Works on the host, with numpy, whose operations on
a few ids cost a third of torch's. Called by the dispatchers in `engine.exchange`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.errors import KernelError
from engine.kernels import checks

_FEW = 128
"""Pairs up to which the calls count and not what they do."""
_MOST_NARROW = 1 << 15
"""Experts whose ids have 16 bits."""


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
        num_physical: P, at least 1.

    Raises:
        KernelError: an id is out of range, the ids are no matrix of integers or have no values, or
            P is no whole number above 0.
    """
    checks.ids_matrix("phy_ids_TK", phy_ids_TK)
    checks.has_values("phy_ids_TK", phy_ids_TK)
    if type(num_physical) is not int or num_physical < 1:
        raise KernelError(f"num_physical ({num_physical!r}) must be a whole number above 0.")
    on_cpu = phy_ids_TK.is_cpu
    ids_N = (phy_ids_TK if on_cpu else phy_ids_TK.cpu()).numpy().ravel()
    few = len(ids_N) <= _FEW
    if few:
        order_N = ids_N.argsort(kind="stable")
        bounds = (ids_N[order_N[0]], ids_N[order_N[-1]]) if len(ids_N) else (0, 0)
    else:
        bounds = ids_N.min(), ids_N.max()
    # Before anything is sized by the largest id.
    if not -1 <= bounds[0] <= bounds[1] < num_physical:
        checks.ids_in_range("phy_ids_TK", phy_ids_TK, num_physical)
    if not few:  # numbers of 16 bits are sorted by their digits, several times as fast
        narrow = np.int16 if num_physical <= _MOST_NARROW else np.int64
        order_N = ids_N.astype(narrow).argsort(kind="stable")
    skipped = 0
    if bounds[0] < 0:
        skipped = int(np.count_nonzero(ids_N < 0))
        ids_N = ids_N[order_N[skipped:]]
    counts: list[int] = np.bincount(ids_N, minlength=num_physical).tolist()
    num_rows = len(order_N) - skipped
    if few and not skipped:
        row_of_N = order_N.argsort()  # one call less
    else:
        row_of_N = np.empty_like(order_N)
        row_of_N[order_N] = np.arange(-skipped, num_rows)
    if skipped:
        row_of_N[order_N[:skipped]] = num_rows
        order_N = order_N[skipped:]
    source, row_of = torch.from_numpy(order_N // phy_ids_TK.shape[1]), torch.from_numpy(row_of_N)
    if not on_cpu:  # a call of nothing costs a microsecond as well
        source, row_of = source.to(phy_ids_TK.device), row_of.to(phy_ids_TK.device)
    return Permutation(source, row_of, counts)
