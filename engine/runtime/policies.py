"""What operators may change of how experts are chosen and run: the policy in force.

`engine.runtime.control` adds tables, ranks and faults, and is what everybody holds. A `layer` is an
index among the MoE layers, the L axis of tables and policies; what is refused changes nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from engine.config import one_of
from engine.errors import RoutingError
from engine.events import ControlEvent, Sink
from engine.routing.capacity import NOT_DETERMINISTIC
from engine.routing.policy import RoutingPolicy
from engine.routing.precision import MODES, Precision, Thresholds
from engine.routing.precision.thresholds import units_in_words
from engine.routing.table import RoutingTable
from engine.runtime.arguments import layer_of, number_of, whole
from engine.runtime.door import Door, InForce, in_words


class PolicyControl:
    """Swaps the policy that each step reads once, and says so."""

    def __init__(self, table: RoutingTable, policy: RoutingPolicy, sink: Sink, door: Door) -> None:
        self._table, self._sink, self._door = table, sink, door
        self._in_force = InForce.of(policy)
        self._changes = 0
        self._lock = threading.RLock()

    @property
    def table(self) -> RoutingTable:
        """The routing table the next step will read."""
        return self._table

    @property
    def policy(self) -> RoutingPolicy:
        """The policy the next step will read."""
        return self._in_force.policy

    @property
    def in_force(self) -> InForce:
        """The policy with what each MoE layer makes of it, for a step to read once."""
        return self._in_force

    @property
    def changes(self) -> int:
        """How often something that steps read was changed: the same number, no change between."""
        return self._changes

    def ban_expert(self, layer: int | None, expert: int) -> None:
        """Never choose `expert` in `layer` (None: in every layer).

        Raises:
            RoutingError: ids out of range, or fewer than top_k experts would be left.
        """
        layer, expert = layer_of(layer), whole("expert", expert)
        self._change(lambda policy: policy.ban(layer, expert))
        self._say("ban_expert", layer=layer, expert=expert)

    def force_experts(self, experts: Sequence[int], layer: int | None = None) -> None:
        """Always choose `experts` in `layer`, weighted by their own scores.

        Raises:
            RoutingError: ids out of range, more than top_k, or one of them is banned.
        """
        if not isinstance(experts, Iterable):
            raise RoutingError(f"experts ({experts!r}) must be a list of expert ids.")
        layer, wanted = layer_of(layer), [whole("expert", expert) for expert in experts]

        def force(policy: RoutingPolicy) -> RoutingPolicy:
            for expert in wanted:
                policy = policy.force(layer, expert)
            return policy

        self._change(force)
        self._say("force_experts", layer=layer, experts=wanted)

    def set_bias(self, layer: int | None, expert: int, value: float) -> None:
        """Add `value` to the logit of `expert` in `layer`.

        Raises:
            RoutingError: ids or value out of range.
        """
        layer, expert, value = layer_of(layer), whole("expert", expert), number_of("bias", value)
        self._change(lambda policy: policy.favour(layer, expert, value))
        self._say("set_bias", layer=layer, expert=expert, value=value)

    def set_smoothing(self, bonus: float, window: int = 1, decay: float = 1.0) -> None:
        """Add `bonus` to the logits of the experts that a sequence used lately.

        0 switches smoothing off and costs nothing. See `engine.routing.smoothing`.

        Args:
            bonus: for an expert of the previous token.
            window: tokens an expert is remembered after its last use; 1 is the previous token.
            decay: factor on the bonus for every further token since then.

        Raises:
            RoutingError: a number is out of range.
        """
        bonus, decay = number_of("bonus", bonus), number_of("decay", decay)
        window = whole("window", window)
        self._change(lambda policy: policy.smoothed(bonus, window, decay))
        self._say("set_smoothing", bonus=bonus, window=window, decay=decay)

    def set_capacity(self, factor: float | None) -> None:
        """Let each expert take at most `factor` times its even share of a step's rows; None: all.

        What finds no room is dropped and counted, see `engine.routing.capacity`.

        Raises:
            RoutingError: the factor is out of range, or the engine is deterministic: what is
                dropped depends on the other rows of the step.
        """
        factor = None if factor is None else number_of("capacity_factor", factor)
        self._change(lambda policy: policy.limited(factor))
        self._say("set_capacity", factor=factor)

    def set_precision(self, mode: str, thresholds: Thresholds | None = None) -> None:
        """Run the experts in the engine's own format, in int8, or chosen by unit, from now on.

        Args:
            mode: `model`, `int8` or `auto`.
            thresholds: for `auto`; None keeps those the engine has.

        Raises:
            ConfigError: no such mode.
            RoutingError: the engine does not hold its experts in both formats, or the thresholds
                are for another number of layers.
        """
        one_of("precision", mode, MODES)
        if not self._door.both_formats:
            raise RoutingError(
                f"precision ({mode}) cannot be set while running: this engine holds its experts in "
                "one format; open it with precision auto (--precision auto)."
            )
        thresholds = thresholds or self.policy.precision.thresholds
        num_layers = self.policy.num_layers
        if not isinstance(thresholds, Thresholds) or len(thresholds.layers) != num_layers:
            raise RoutingError(
                f"thresholds ({thresholds!r:.60}) must be a Thresholds of {num_layers} MoE layers."
            )
        precision = Precision(mode, thresholds)
        self._change(lambda policy: replace(policy, precision=precision))
        self._say("set_precision", mode=mode, units=units_in_words(thresholds))

    def set_policy(self, policy: RoutingPolicy) -> None:
        """Put a whole policy in force, such as `policy` was before a change.

        Raises:
            RoutingError: it is no policy, or one for another model.
        """
        if not isinstance(policy, RoutingPolicy):
            raise RoutingError(f"policy ({policy!r:.80}) must be a RoutingPolicy.")
        shape = (policy.num_layers, policy.num_experts, policy.top_k)
        current = self.policy
        wanted = (current.num_layers, current.num_experts, current.top_k)
        if shape != wanted:
            raise RoutingError(
                f"the policy is for (layers, experts, top_k) {shape}; this engine runs {wanted}."
            )
        self._change(lambda current: policy.checked())
        self._say("set_policy", **in_words(policy))

    def clear_policy(self) -> None:
        """Forget all bans, forced experts and biases, switch smoothing and capacity off.

        Number formats stay: they decide how experts run, not which.
        """
        self._change(
            lambda policy: RoutingPolicy(
                num_layers=policy.num_layers,
                num_experts=policy.num_experts,
                top_k=policy.top_k,
                precision=policy.precision,
            )
        )
        self._say("clear_policy")

    def _change(self, change: Callable[[RoutingPolicy], RoutingPolicy]) -> None:
        with self._lock:
            policy = change(self.policy)
            if policy.capacity_factor is not None and self._door.deterministic:
                raise RoutingError(NOT_DETERMINISTIC.format(policy.capacity_factor))
            self._in_force = InForce.of(policy)
            self._changes += 1

    def _say(self, action: str, **detail: Any) -> None:
        if self._sink.enabled:
            self._sink.emit(ControlEvent(action, detail, self._table.version, time.time()))
