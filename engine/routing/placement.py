"""Plan where experts live: pure functions from a shape, or a load, to the next table."""

from __future__ import annotations

import numpy as np

from engine.errors import RoutingError
from engine.routing.table import Int, RoutingTable


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


def replicated(load_LE: Int, num_devices: int, *, version: int, spare: int = 1) -> RoutingTable:
    """Plan each layer afresh so that every device gets about the same number of rows.

    Every device has room for its share of the experts and `spare` more. The busiest experts, by
    rows per copy, get the further copies, at most one on each device; then copies are dealt out,
    always to a device with most room left, and among those to the one with fewest rows.

    Load ``[[6, 1, 1, 0]]`` on 2 devices of 3 slots gives experts 0 and 1 a copy on each:
    ``phy2log = [[0, 1, 2, 0, 1, 3]]``.

    Args:
        load_LE: (L, E) rows of each logical expert, as counted in a recent window.
        num_devices: G.
        version: of the new table.
        spare: further slots on each device, 0 or more.

    Raises:
        RoutingError: `spare` leaves more slots on a device than there are experts.

    Source: the greedy step of DeepSeek's expert-parallel load balancer (EPLB), on one level.
    """
    num_layers, num_experts = load_LE.shape
    room = -(-num_experts // num_devices) + spare
    if spare < 0 or room > num_experts:
        raise RoutingError(
            f"spare ({spare}) must lie between 0 and {num_experts - room + spare}, because a "
            f"device holds at most one copy of each of the {num_experts} experts."
        )
    slots = [_dealt(load_LE[layer], num_devices, room) for layer in range(num_layers)]
    return filled(
        np.array(slots),
        np.repeat(np.arange(num_devices), room),
        num_experts,
        num_devices,
        version=version,
    )


def _dealt(load_E: Int, num_devices: int, room: int) -> list[int]:
    """Return what the slots of one layer hold, device by device."""
    copies = np.ones(len(load_E), dtype=np.int64)
    while copies.sum() < num_devices * room:
        each = np.where(copies < num_devices, load_E / copies, -1.0)
        copies[int(each.argmax())] += 1
    held: list[list[int]] = [[] for _ in range(num_devices)]
    rows = np.zeros(num_devices)
    for expert in sorted(range(len(load_E)), key=lambda e: (-copies[e], -load_E[e] / copies[e], e)):
        order = sorted(range(num_devices), key=lambda device: (len(held[device]), rows[device]))
        for device in order[: copies[expert]]:
            held[device].append(expert)
            rows[device] += load_E[expert] / copies[expert]
    return [expert for experts in held for expert in experts]


def _even_ranks(num_experts: int, num_devices: int) -> list[int]:
    share, extra = divmod(num_experts, num_devices)
    sizes = [share + (device < extra) for device in range(num_devices)]
    return [device for device, size in enumerate(sizes) for _ in range(size)]
