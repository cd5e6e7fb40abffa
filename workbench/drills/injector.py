"""What a drill's method and rollbacks do to the engine, through `engine.runtime.control` alone.

Nothing here is ever read by a check. Every fault set has a lease, after which the engine heals it
by itself; what a fault leaves behind (a torn table) is mended by the drill's rollbacks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.faults import Fault
from engine.routing.placement import filled
from engine.routing.table import RoutingTable
from engine.runtime.control import Control

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.drills.scenario import Call


@dataclass(slots=True)
class Target:
    """The engine a drill may break, and what the frame knows of it."""

    control: Control
    snapshot: RoutingTable
    """The table from before the drill."""
    rng: np.random.Generator
    """From the drill's seed: which layer, which expert."""
    lease_s: float
    planned: list[dict[str, Any]] = field(default_factory=list)
    """The change record: version and hash of every table as it was planned, newest last."""

    def publish(self, table: RoutingTable) -> None:
        """Publish a table and write it into the change record as it was meant to be."""
        self.planned.append({"version": table.version, "sha256": table.sha256()})
        self.control.publish_table(table)


def alternate_gate(target: Target, amplitude: float) -> None:
    """Let every expert's logit alternate from token to token by plus or minus `amplitude`."""
    num_layers, num_experts = target.snapshot.num_layers, target.snapshot.num_experts
    signs_LE = target.rng.choice([-1.0, 1.0], (num_layers, num_experts))
    noise_LE = _tensor(amplitude * signs_LE)
    turn = _Turn(num_layers)

    def fault(logits_TE: Tensor) -> Tensor:
        import torch

        layer, passes = turn.next()
        # Rows of a prompt alternate along the batch, a running sequence from step to step.
        sign_T = 1 - 2 * ((torch.arange(len(logits_TE)) + passes) % 2)
        return logits_TE + sign_T[:, None] * noise_LE[layer]

    _inject(target, "gate.logits", fault)


def favour_expert(target: Target, bias: float) -> None:
    """Add `bias` to the logits of one expert in one layer, both drawn by the seed."""
    num_layers, num_experts = target.snapshot.num_layers, target.snapshot.num_experts
    hot_layer = int(target.rng.integers(num_layers))
    bias_E = np.zeros(num_experts)
    bias_E[int(target.rng.integers(num_experts))] = bias
    bias_tensor_E = _tensor(bias_E)
    turn = _Turn(num_layers)

    def fault(logits_TE: Tensor) -> Tensor:
        layer, _ = turn.next()
        return logits_TE + bias_tensor_E if layer == hot_layer else logits_TE

    _inject(target, "gate.logits", fault)


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

    _inject(target, "table.publish", fault)


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


def heal(target: Target, point: str) -> None:
    """Clear a fault point."""
    target.control.clear(point)


def clear_policy(target: Target) -> None:
    """Forget every ban, forced expert and bias, and switch smoothing off."""
    target.control.clear_policy()


def restore_table(target: Target) -> None:
    """Publish the contents of the table from before the drill, whole, as a newer version."""
    before = target.snapshot
    target.publish(
        RoutingTable(
            version=target.control.table.version + 1,
            phy2log=before.phy2log,
            log2phy=before.log2phy,
            num_replicas=before.num_replicas,
            rank_of_phy=before.rank_of_phy,
            num_devices=before.num_devices,
        )
    )


ACTIONS: dict[str, Callable[..., None]] = {
    action.__name__: action
    for action in (
        alternate_gate,
        favour_expert,
        tear_next_table,
        rotate_experts,
        heal,
        clear_policy,
        restore_table,
    )
}
"""By name, as drill files call them."""

_BREAKS = {
    "alternate_gate": "gate.logits",
    "favour_expert": "gate.logits",
    "tear_next_table": "table.publish",
}
"""The fault point each action sets."""


def undone(method: Sequence[Call], rollbacks: Sequence[Call]) -> Iterator[str]:
    """Yield what the method breaks and the rollbacks do not heal, one sentence each."""
    healed = {call.arguments.get("point") for call in rollbacks if call.func == "heal"}
    for call in method:
        point = _BREAKS.get(call.func)
        if point and point not in healed:
            yield f"rollbacks must heal {point}, which the method's {call.func} breaks."
    names = {call.func for call in rollbacks}
    for needed in ("clear_policy", "restore_table"):
        if needed not in names:
            yield f"rollbacks must call {needed}: a learner may have changed that."


class _Turn:
    """Counts the calls of a point that every layer reaches once a forward pass."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers, self._calls = num_layers, 0

    def next(self) -> tuple[int, int]:
        """Return the layer of this call and the number of passes before it."""
        passes, layer = divmod(self._calls, self._num_layers)
        self._calls += 1
        return layer, passes


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


def _inject(target: Target, point: str, fault: Fault) -> None:
    target.control.inject(point, fault, target.lease_s)


def _tensor(values: Any) -> Tensor:
    import torch

    return torch.tensor(values, dtype=torch.float32)
