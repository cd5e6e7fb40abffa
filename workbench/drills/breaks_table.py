"""Faults of tables: half of one arrives, or it counts what is not there."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from engine.routing.placement import filled
from engine.routing.table import RoutingTable
from workbench.drills.injector import Target, action


@action
def tear_next_table(target: Target) -> None:
    """Let the next published table arrive half: some layers still look up slots in the old one."""
    num_layers = target.snapshot.num_layers
    stale = target.rng.permutation(num_layers)[: max(1, num_layers // 2)]
    armed = True

    def fault(table: RoutingTable) -> RoutingTable:
        nonlocal armed
        if not armed or table.log2phy.shape != target.control.table.log2phy.shape:
            return table
        armed = False
        return _torn(table, target.control.table, stale)

    target.inject("table.publish", fault)


@action
def count_twice(target: Target) -> None:
    """Publish a table that counts a copy twice in every layer: two entries, one slot."""
    armed = True

    def fault(table: RoutingTable) -> RoutingTable:
        nonlocal armed
        if not armed:
            return table
        armed = False
        return _twice(table)

    target.inject("table.publish", fault)
    load_LE = np.ones((target.snapshot.num_layers, target.snapshot.num_experts))
    for layer_E in load_LE:
        layer_E[target.rng.choice(len(layer_E), 2, replace=False)] = 4.0
    target.plan(load_LE, spare=1)


@action
def rotate_experts(target: Target, places: int) -> None:
    """Publish a table in which every expert has moved on by some slots: a planned migration."""
    table = target.control.table
    target.publish(
        filled(
            np.roll(table.phy2log, places, axis=1),
            table.rank_of_phy,
            table.num_experts,
            table.num_devices,
            version=table.version + 1,
        )
    )


def _torn(new: RoutingTable, old: RoutingTable, stale: Any) -> RoutingTable:
    """Return `new` with the look-up rows of the stale layers left as in `old`.

    A whole table refuses such contents when it is made, so the copy is written over in place, as a
    writer would that is read in the middle.
    """
    torn = copy.copy(new)
    log2phy = new.log2phy.copy()
    log2phy[stale] = old.log2phy[stale]
    log2phy.setflags(write=False)
    object.__setattr__(torn, "log2phy", log2phy)
    object.__setattr__(torn, "is_identity", False)
    return torn


def _twice(table: RoutingTable) -> RoutingTable:
    """Return a table whose copies of an expert all name the slot of its first one."""
    twice = copy.copy(table)
    first_LE1 = table.log2phy[:, :, :1]
    log2phy = np.where(table.log2phy >= 0, first_LE1, -1)
    log2phy.setflags(write=False)
    object.__setattr__(twice, "log2phy", log2phy)
    return twice
