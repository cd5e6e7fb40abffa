"""Tables for those ranks that take part: after one has gone, and after one has come.

Also what ranks are for. Usually every rank owns sequences and holds experts; apart, the first ranks
own the sequences and the others hold the experts. That is only a placement: when one kind has died
out, ranks of the other do its work too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from engine.errors import RoutingError
from engine.routing.table import RoutingTable


@dataclass(frozen=True, slots=True)
class Roles:
    """Which ranks own sequences and which hold experts."""

    attention_ranks: int = 0
    """So many, the first ones, own sequences and hold no experts; 0: every rank does both."""

    def homes(self, members: Iterable[int]) -> list[int]:
        """Return those of `members` that own sequences: 0 and 1 of 0 to 3 with 2 for attention."""
        living = sorted(members)
        wanted = [rank for rank in living if rank < self.attention_ranks]
        return wanted or living

    def holders(self, members: Iterable[int]) -> list[int]:
        """Return those of `members` that hold experts: 2 and 3 of 0 to 3 with 2 for attention."""
        living = sorted(members)
        wanted = [rank for rank in living if rank >= self.attention_ranks]
        return wanted or living


def without(table: RoutingTable, members: Collection[int]) -> RoutingTable:
    """Give the physical experts of ranks that are gone to the members, the least loaded first.

    Owners ``[0, 0, 1, 1, 2, 2]`` of which rank 1 is gone give ``[0, 0, 0, 2, 2, 2]``. A member that
    already holds a copy of the same expert is passed over while another is left.

    Raises:
        RoutingError: nobody is left.
    """
    left = sorted(members)
    if not left:
        raise RoutingError("no rank is left to hold the experts; start the engine again.")
    owners = table.rank_of_phy.copy()
    for phy in np.flatnonzero(~np.isin(owners, left)):
        others = np.arange(table.num_physical) != phy
        copies = (table.phy2log == table.phy2log[:, [phy]]).any(axis=0) & others
        owners[phy] = min(
            left,
            key=lambda rank: (
                bool((owners[copies] == rank).any()),
                int((owners == rank).sum()),
                rank,
            ),
        )
    return table.moved(owners)


def levelled(table: RoutingTable, members: Collection[int]) -> RoutingTable:
    """Move physical experts, as few as possible, until no member holds two more than another.

    Owners ``[0, 0, 0, 2, 2, 2]`` with members 0, 1, 2 give ``[0, 0, 1, 2, 2, 1]``.
    """
    owners, left = table.rank_of_phy.copy(), sorted(members)
    while True:
        counts = {rank: int((owners == rank).sum()) for rank in left}
        fullest, emptiest = (pick(left, key=lambda rank: counts[rank]) for pick in (max, min))
        if counts[fullest] - counts[emptiest] <= 1:
            break
        owners[np.flatnonzero(owners == fullest)[-1]] = emptiest
    return table.moved(owners)
