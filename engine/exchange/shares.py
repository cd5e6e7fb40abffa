"""Who holds which experts, and how a batch and its rows are cut and ordered by that.

Pure; used by `engine.exchange.ranks`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.errors import RoutingError
from engine.routing.table import RoutingTable


@dataclass(frozen=True, slots=True)
class Shares:
    """Who holds what under one table, seen by one rank."""

    table: RoutingTable
    position_of_phy: Tensor
    """(P,) int64: physical experts counted rank by rank."""
    slots: list[int]
    """Physical experts of each member of the group, one after the other."""
    mine: list[int]
    """The physical experts of this rank."""


def shares_of(table: RoutingTable, members: Sequence[int], me: int) -> Shares:
    """Count the physical experts rank by rank.

    Owners ``[1, 0, 1]`` give positions ``[1, 0, 2]`` and one slot on rank 0, two on rank 1.

    Raises:
        RoutingError: the table puts an expert on a device that is not a member.
    """
    owners = table.rank_of_phy
    if strangers := sorted(set(owners.tolist()) - set(members)):
        raise RoutingError(
            f"table version {table.version} puts experts on rank {strangers[0]}, but the group has "
            f"ranks {list(members)}; publish a table for these."
        )
    order = np.argsort(owners, kind="stable")
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    return Shares(
        table,
        torch.from_numpy(position),
        [int((owners == member).sum()) for member in members],
        np.flatnonzero(owners == me).tolist(),
    )


def parts_of(mode: str, lengths: Sequence[int], num_rounds: int) -> tuple[slice, ...]:
    """Cut a batch: three requests of 2, 1, 1 rows overlapped give rows 0-1 and 2-3."""
    total = sum(lengths)
    if mode == "overlapped":
        return slice(0, (total + 1) // 2), slice((total + 1) // 2, total)
    if mode == "request":
        ends = [0, *itertools.accumulate(lengths)]
        ends += [total] * (max(1, num_rounds) + 1 - len(ends))
        return tuple(slice(start, end) for start, end in itertools.pairwise(ends))
    return (slice(None),)


def split(counts: list[int], slots: list[int]) -> list[list[int]]:
    """Cut a list into pieces of given lengths: ``[5, 6, 7]`` by 1 and 2 gives ``[5], [6, 7]``."""
    ends = [0, *itertools.accumulate(slots)]
    return [counts[start:end] for start, end in itertools.pairwise(ends)]


def by_expert(counts_GS: Tensor) -> Tensor:
    """Order rows that came by source, then expert, by expert, then source.

    Counts ``[[1, 1], [1, 0]]``: source 0 sent rows 0 (expert 0) and 1 (expert 1), source 1 row 2
    (expert 0); the order is ``[0, 2, 1]``.
    """
    experts_GS = torch.arange(counts_GS.shape[1]).expand(counts_GS.shape)
    of_row_R = torch.repeat_interleave(experts_GS.reshape(-1), counts_GS.reshape(-1))
    return torch.argsort(of_row_R, stable=True)
