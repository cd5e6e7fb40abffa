"""Plan where experts live: pure functions from a shape, or a load, to the next table."""

from __future__ import annotations

import numpy as np

from engine.errors import RoutingError
from engine.routing.table import RoutingTable


def contiguous(
    num_layers: int, num_experts: int, num_devices: int, *, version: int = 0
) -> RoutingTable:
    """Spread experts over devices in order, one copy each, shares differing by at most one.

    30 experts on 8 devices give shares 4, 4, 4, 4, 4, 4, 3, 3; 2 experts on 4 devices leave
    devices 2 and 3 without experts, which is legal.
    """
    return assigned(
        num_layers,
        _even_ranks(num_experts, num_devices),
        num_devices,
        version=version,
    )


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


def _even_ranks(num_experts: int, num_devices: int) -> list[int]:
    share, extra = divmod(num_experts, num_devices)
    sizes = [share + (device < extra) for device in range(num_devices)]
    return [device for device, size in enumerate(sizes) for _ in range(size)]
