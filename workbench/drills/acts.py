"""What a learner can do to the drill's routing: an operator's repairs, right and wrong ones.

`workbench.drills.acts_deploy` has what can be done to the deployment around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.errors import ConfigError, RoutingError
from engine.routing.balance import replicated
from engine.routing.placement import contiguous, filled
from engine.routing.table import RoutingTable
from workbench.drills import acts_deploy
from workbench.drills.hands import ACTS, Hands, act, offered, perform
from workbench.trace.trace import Trace

__all__ = ["ACTS", "Hands", "acts_deploy", "offered", "perform"]


@act
def smooth(hands: Hands, trace: Trace, bonus: float) -> str:
    """Give the experts of a sequence's previous token a bonus on their logits; 0 switches it off.

    Args:
        hands: the engine.
        trace: the recent window.
        bonus: in logits.
    """
    hands.control.set_smoothing(bonus)
    return f"smoothing adds {bonus:g} to the experts of the previous token"


@act
def bias(hands: Hands, trace: Trace, expert: int, value: float, layer: int | None = None) -> str:
    """Add a value to an expert's logit, in one layer or in all."""
    hands.control.set_bias(layer, expert, value)
    return f"expert {expert} gets {value:+g} in {_where(layer)}"


@act
def ban(hands: Hands, trace: Trace, expert: int, layer: int | None = None) -> str:
    """Never choose an expert, in one layer or in all."""
    hands.control.ban_expert(layer, expert)
    return f"expert {expert} is banned in {_where(layer)}"


@act
def force(hands: Hands, trace: Trace, experts: Sequence[int], layer: int | None = None) -> str:
    """Always choose these experts, in one layer or in all."""
    hands.control.force_experts(experts, layer)
    return f"experts {', '.join(map(str, experts))} are forced in {_where(layer)}"


@act
def clear_policy(hands: Hands, trace: Trace) -> str:
    """Forget all bans, forced experts and biases, and switch smoothing off."""
    hands.control.clear_policy()
    return "bans, forced experts, biases and smoothing are gone"


@act
def publish(hands: Hands, trace: Trace) -> str:
    """Publish a whole new table: experts in order, one copy each, even shares."""
    now = hands.control.table
    table = contiguous(now.num_layers, now.num_experts, now.num_devices, version=now.version + 1)
    hands.publish(table)
    return _published(table)


@act
def rebalance(hands: Hands, trace: Trace, spare: int = 1) -> str:
    """Publish a table planned for the recent load, with room for `spare` copies on each device."""
    table = _planned(hands, trace.expert_counts(), spare)
    return _published(table)


@act
def replicate(hands: Hands, trace: Trace, layer: int, expert: int, spare: int = 1) -> str:
    """Publish a table with a copy of one expert of one layer on every device."""
    now = hands.control.table
    _check_cell(now, layer, expert)
    wish_LE = np.ones((now.num_layers, now.num_experts), dtype=np.int64)
    wish_LE[layer, expert] = now.num_experts * now.num_devices
    return _published(_planned(hands, wish_LE, spare))


@act
def replicate_busiest(hands: Hands, trace: Trace, spare: int = 1) -> str:
    """Publish a table with a copy, on every device, of the expert that most tokens chose."""
    return replicate(hands, trace, *_busiest(trace), spare)


@act
def move(hands: Hands, trace: Trace, layer: int, expert: int, device: int) -> str:
    """Publish a table in which an expert of a layer has changed places with one of a device."""
    now = hands.control.table
    _check_cell(now, layer, expert)
    if not 0 <= device < now.num_devices:
        raise RoutingError(f"device ({device}) must lie between 0 and {now.num_devices - 1}.")
    slot = int(np.flatnonzero(now.phy2log[layer] == expert)[0])
    if now.rank_of_phy[slot] == device:
        raise RoutingError(f"expert {expert} of layer {layer} lives on device {device} already.")
    other = int(np.flatnonzero(now.rank_of_phy == device)[0])
    phy2log = now.phy2log.copy()
    phy2log[layer, [slot, other]] = phy2log[layer, [other, slot]]
    table = filled(
        phy2log, now.rank_of_phy, now.num_experts, now.num_devices, version=now.version + 1
    )
    hands.publish(table)
    return _published(table)


@act
def move_busiest(hands: Hands, trace: Trace) -> str:
    """Publish a table in which the expert that most tokens chose has gone to the next device."""
    layer, expert = _busiest(trace)
    now = hands.control.table
    home = int(now.rank_of_phy[np.flatnonzero(now.phy2log[layer] == expert)[0]])
    return move(hands, trace, layer, expert, (home + 1) % now.num_devices)


def _busiest(trace: Trace) -> tuple[int, int]:
    """Return layer and expert of the largest count of rows.

    Raises:
        ConfigError: nothing has run since the last change.
    """
    if not trace.num_rows:
        raise ConfigError("no row has run since the last change; try again in a moment.")
    counts_LE = trace.expert_counts()
    layer, expert = np.unravel_index(int(counts_LE.argmax()), counts_LE.shape)
    return int(layer), int(expert)


def _planned(hands: Hands, load_LE: Any, spare: int) -> RoutingTable:
    now = hands.control.table
    table = replicated(load_LE, now.num_devices, version=now.version + 1, spare=spare)
    hands.publish(table)
    return table


def _check_cell(table: RoutingTable, layer: int, expert: int) -> None:
    if not 0 <= layer < table.num_layers:
        raise RoutingError(f"layer ({layer}) must lie between 0 and {table.num_layers - 1}.")
    if not 0 <= expert < table.num_experts:
        raise RoutingError(f"expert ({expert}) must lie between 0 and {table.num_experts - 1}.")


def _published(table: RoutingTable) -> str:
    return f"published table version {table.version}, planned hash {table.sha256()[:12]}"


def _where(layer: int | None) -> str:
    return "every layer" if layer is None else f"layer {layer}"
