"""Capacity: how many rows an expert takes in one layer of one step; beyond it rows are dropped.

    rows = max(LEAST_ROWS, ceil(factor x T x K / E))

Off by default: nothing is dropped, whatever the load. A factor of 1.2 to 2 bounds how long the
busiest expert keeps the others waiting, and pays with quality: a dropped slot adds nothing to its
token, whose other experts keep their weights. When an expert is asked for too much, the slots with
the least routing weight are dropped, later rows first among equals, because they change their
tokens least; by order of arrival the same request would lose more the later it came.

What is dropped depends on the step's other rows, so deterministic mode refuses it. Between ranks
each counts the rows it owns, so no message is needed to agree.

Source: GShard, arXiv 2006.16668, section 2.2; dropping by weight: arXiv 2106.05974, section 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from engine.errors import RoutingError
from engine.kernels.topk import Selection

NOT_DETERMINISTIC = (
    "capacity_factor ({}) must be left out in deterministic mode, because which rows are dropped "
    "depends on the other rows of the step; drop one of the two."
)
LEAST_ROWS = 4
"""Of one expert, however small the step: a few rows overload nobody."""
LOW, HIGH = 1.0, 16.0
"""The factors allowed; 1.2 to 2 are usual."""


def check_factor(factor: float | None) -> None:
    """Raise `RoutingError` unless a capacity factor is None or within its bounds."""
    if factor is not None and not LOW <= factor <= HIGH:
        raise RoutingError(
            f"capacity_factor ({factor}) must lie between {LOW:g} and {HIGH:g}, usual are 1.2 to "
            "2; leave it out to drop nothing."
        )


def rows_allowed(factor: float, num_rows: int, top_k: int, num_experts: int) -> int:
    """Return how many rows an expert may take.

    40 rows, K = 2, E = 8 and factor 1.25 allow 13: each has 10 on average.
    """
    return max(LEAST_ROWS, math.ceil(factor * num_rows * top_k / num_experts))


class Capacity:
    """The capacity of one step: limits each layer and counts what was dropped."""

    def __init__(self, factor: float, num_layers: int, num_experts: int) -> None:
        self.factor, self.num_experts = factor, num_experts
        self.rows = [-1] * num_layers
        """By MoE layer: rows an expert could take."""
        self.dropped = [0] * num_layers
        """By MoE layer: slots that were dropped."""

    def limit(
        self,
        chosen: Selection,
        phy_ids_TK: Tensor,
        layer: int,
        fault: Callable[[int], int] | None = None,
    ) -> Tensor:
        """Return (T, K) physical experts with -1 for each dropped slot.

        Args:
            chosen: the choice of T rows.
            phy_ids_TK: where each slot was placed.
            layer: index among the MoE layers.
            fault: changes the rows allowed, see `engine.faults`.
        """
        ids_TK = chosen.topk_ids_TK
        num_rows, top_k = ids_TK.shape
        allowed = rows_allowed(self.factor, num_rows, top_k, self.num_experts)
        if fault is not None:
            allowed = fault(allowed)
        self.rows[layer] = allowed
        spilled_TK = spilled(ids_TK, chosen.topk_weights_TK, allowed)
        if spilled_TK is None:
            return phy_ids_TK
        self.dropped[layer] = int(spilled_TK.sum())
        return phy_ids_TK.masked_fill(spilled_TK, -1)


def spilled(topk_ids_TK: Tensor, topk_weights_TK: Tensor, allowed: int) -> Tensor | None:
    """Return (T, K) bool, the slots beyond `allowed` rows of their expert; None when none are.

    Ids ``[[0, 1], [0, 2], [0, 1]]`` with weights ``[[0.9, 0.1], [0.6, 0.4], [0.6, 0.4]]`` and one
    row allowed keep expert 0's slot of row 0, expert 1's of row 2 and expert 2's.
    """
    ids_N = topk_ids_TK.flatten().cpu().numpy()
    counts_E = np.bincount(ids_N) if len(ids_N) else np.zeros(1, np.int64)
    if counts_E.max() <= allowed:
        return None
    order_N = np.lexsort((-topk_weights_TK.flatten().cpu().numpy(), ids_N))
    place_N = np.empty_like(order_N)
    starts_E = counts_E.cumsum() - counts_E
    place_N[order_N] = np.arange(len(ids_N)) - starts_E[ids_N[order_N]]
    return torch.from_numpy(place_N >= allowed).view_as(topk_ids_TK).to(topk_ids_TK.device)
