"""Tables for those ranks that take part: after one has gone, and after one has come."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from engine.errors import RoutingError
from engine.routing.table import RoutingTable


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
    return RoutingTable(
        table.version + 1,
        table.phy2log,
        table.log2phy,
        table.num_replicas,
        owners,
        table.num_devices,
    )


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
    return RoutingTable(
        table.version + 1,
        table.phy2log,
        table.log2phy,
        table.num_replicas,
        owners,
        table.num_devices,
    )
