"""Plan where experts live: pure functions from a shape, or a load, to the next table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.errors import RoutingError
from engine.routing.table import Int, RoutingTable


def contiguous(
    num_layers: int,
    num_experts: int,
    num_devices: int,
    *,
    version: int = 0,
    holders: Sequence[int] | None = None,
) -> RoutingTable:
    """Spread experts over devices in order, one copy each, shares differing by at most one.

    30 experts on 8 devices give shares 4, 4, 4, 4, 4, 4, 3, 3; 2 experts on 4 devices leave
    devices 2 and 3 without experts, which is legal. `holders` are the devices that take experts;
    None is all of them.
    """
    holders = range(num_devices) if holders is None else holders
    shares = even_shares(num_experts, len(holders))
    ranks = [device for device, share in zip(holders, shares, strict=True) for _ in range(share)]
    return assigned(num_layers, ranks, num_devices, version=version)


def assigned(
    num_layers: int, rank_of_expert: list[int], num_devices: int, *, version: int = 0
) -> RoutingTable:
    """Build a table in which physical expert i is logical expert i, on the device given for it."""
    num_experts = len(rank_of_expert)
    if not num_experts:
        raise RoutingError("a routing table needs at least one expert; got none.")
    phy2log = np.tile(np.arange(num_experts), (num_layers, 1))
    return RoutingTable(
        version=version,
        phy2log=phy2log,
        log2phy=phy2log[..., None],
        num_replicas=np.ones_like(phy2log),
        rank_of_phy=np.array(rank_of_expert),
        num_devices=num_devices,
    )


def filled(
    phy2log: Int, rank_of_phy: Int, num_experts: int, num_devices: int, *, version: int
) -> RoutingTable:
    """Build the table of given slots: what each holds, where each lives.

    Slots ``[[0, 1, 0]]`` of 2 experts give ``log2phy = [[[0, 2], [1, -1]]]`` and ``num_replicas =
    [[2, 1]]``.

    Args:
        phy2log: (L, P) the logical expert each slot holds.
        rank_of_phy: (P,) the device of each slot.
        num_experts: E.
        num_devices: G.
        version: of the new table.

    Raises:
        RoutingError: an expert has no slot in some layer.
    """
    num_layers = len(phy2log)
    held = phy2log[..., None] == np.arange(num_experts)  # (L, P, E)
    num_replicas = held.sum(axis=1)
    log2phy = np.full((num_layers, num_experts, max(1, num_replicas.max(initial=1))), -1)
    turn = held.cumsum(axis=1) - 1
    layers, slots, experts = np.nonzero(held)
    log2phy[layers, experts, turn[layers, slots, experts]] = slots
    return RoutingTable(
        version=version,
        phy2log=phy2log,
        log2phy=log2phy,
        num_replicas=num_replicas,
        rank_of_phy=rank_of_phy,
        num_devices=num_devices,
    )


def even_shares(total: int, parts: int) -> list[int]:
    """Split a number into parts that differ by at most one, the larger ones first.

    30 in 8 parts: 4, 4, 4, 4, 4, 4, 3, 3.
    """
    share, extra = divmod(total, parts)
    return [share + (part < extra) for part in range(parts)]
