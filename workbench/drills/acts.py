"""What a learner can do to the drill's engine: an operator's repairs, right and wrong ones.

Each act takes the engine's control and the newest readings, changes the engine through the control
alone, and returns one sentence about what was done.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.errors import ConfigError, RoutingError, nearest
from engine.routing.balance import replicated
from engine.routing.placement import contiguous, filled
from engine.routing.table import RoutingTable
from engine.runtime.control import Control
from workbench.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class Hands:
    """What an act works with."""

    control: Control
    publish: Callable[[RoutingTable], None]
    """Publishes a table and notes it in the change record."""


def smooth(hands: Hands, trace: Trace, bonus: float) -> str:
    """Give the experts of a sequence's previous token a bonus on their logits; 0 switches it off.

    Args:
        hands: the engine.
        trace: the recent window.
        bonus: in logits.
    """
    hands.control.set_smoothing(bonus)
    return f"smoothing adds {bonus:g} to the experts of the previous token"


def bias(hands: Hands, trace: Trace, expert: int, value: float, layer: int | None = None) -> str:
    """Add a value to an expert's logit, in one layer or in all."""
    hands.control.set_bias(layer, expert, value)
    return f"expert {expert} gets {value:+g} in {_where(layer)}"


def ban(hands: Hands, trace: Trace, expert: int, layer: int | None = None) -> str:
    """Never choose an expert, in one layer or in all."""
    hands.control.ban_expert(layer, expert)
    return f"expert {expert} is banned in {_where(layer)}"


def force(hands: Hands, trace: Trace, experts: Sequence[int], layer: int | None = None) -> str:
    """Always choose these experts, in one layer or in all."""
    hands.control.force_experts(experts, layer)
    return f"experts {', '.join(map(str, experts))} are forced in {_where(layer)}"


def clear_policy(hands: Hands, trace: Trace) -> str:
    """Forget all bans, forced experts and biases, and switch smoothing off."""
    hands.control.clear_policy()
    return "bans, forced experts, biases and smoothing are gone"


def publish(hands: Hands, trace: Trace) -> str:
    """Publish a whole new table: experts in order, one copy each, even shares."""
    now = hands.control.table
    table = contiguous(now.num_layers, now.num_experts, now.num_devices, version=now.version + 1)
    hands.publish(table)
    return _published(table)


def rebalance(hands: Hands, trace: Trace, spare: int = 1) -> str:
    """Publish a table planned for the recent load, with room for `spare` copies on each device."""
    table = _planned(hands, trace.expert_counts(), spare)
    return _published(table)


def replicate(hands: Hands, trace: Trace, layer: int, expert: int, spare: int = 1) -> str:
    """Publish a table with a copy of one expert of one layer on every device."""
    now = hands.control.table
    _check_cell(now, layer, expert)
    wish_LE = np.ones((now.num_layers, now.num_experts), dtype=np.int64)
    wish_LE[layer, expert] = now.num_experts * now.num_devices
    return _published(_planned(hands, wish_LE, spare))


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


ACTS: dict[str, Callable[..., str]] = {
    "smooth": smooth,
    "bias": bias,
    "ban": ban,
    "force": force,
    "clear-policy": clear_policy,
    "publish": publish,
    "rebalance": rebalance,
    "replicate": replicate,
    "move": move,
}
"""By name, as the command line and drill files call them."""


def perform(name: str, arguments: Mapping[str, Any], hands: Hands, trace: Trace) -> str:
    """Do one act by name.

    Raises:
        ConfigError: there is no such act, or its arguments do not fit it.
        RoutingError: the engine refused.
    """
    if name not in ACTS:
        raise ConfigError(
            f"unknown act {name!r}{nearest(name, ACTS)} known acts: {', '.join(ACTS)}."
        )
    try:
        bound = inspect.signature(ACTS[name]).bind(hands, trace, **arguments)
    except TypeError as wrong:
        raise ConfigError(f"act {name}: {wrong}.") from None
    for key, value in arguments.items():
        _check_type(name, key, value, ACTS[name].__annotations__[key])
    return ACTS[name](*bound.args, **bound.kwargs)


def _check_type(act: str, key: str, value: Any, wanted: str) -> None:
    """Refuse a value that is not of the annotated kind; a message from outside may hold any."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    right = {
        "float": whole or isinstance(value, float),
        "int": whole,
        "int | None": whole or value is None,
        "Sequence[int]": isinstance(value, list | tuple)
        and all(isinstance(item, int) and not isinstance(item, bool) for item in value),
    }[wanted]
    if not right:
        raise ConfigError(f"act {act}: {key} ({value!r}) must be of the kind {wanted}.")


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
