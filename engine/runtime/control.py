"""The one door for operators, the dashboard and drills.

Policies and tables are immutable and swapped by one reference, which each step reads once, so these
calls may come from any thread and never meet half of a change; a lock keeps two callers from
undoing each other's. Everything done here is an event. A `layer` is an index among the MoE layers,
the L axis of tables and policies; what is refused changes nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine.config import EXCHANGES, one_of, within
from engine.errors import FaultError, RoutingError
from engine.events import ControlEvent, Sink
from engine.faults import ONLY_IN_DRILLS, Fault, Faults
from engine.routing.capacity import NOT_DETERMINISTIC
from engine.routing.policy import RoutingPolicy
from engine.routing.precision import MODES, Precision, Thresholds
from engine.routing.precision.thresholds import units_in_words
from engine.routing.table import RoutingTable
from engine.runtime.arguments import check_travels, is_number, layer_of, number_of, whole
from engine.runtime.door import Door, InForce, Order, in_words
from engine.runtime.results import EngineStats


class Control:
    """Changes a running engine between its steps."""

    def __init__(
        self,
        table: RoutingTable,
        policy: RoutingPolicy,
        faults: Faults,
        sink: Sink,
        stats: Callable[[], EngineStats],
        door: Door | None = None,
    ) -> None:
        self._table = table
        self._door = door or Door()
        self._faults, self._sink, self._stats = faults, sink, stats
        self._in_force = InForce.of(policy)
        self._changes = self._times_broken = 0
        self._canary: dict[str, Any] | None = None
        self._leases: dict[str, float] = {}
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

    @property
    def conditions(self) -> bytes | None:
        """What keys and values in the cache depend on besides tokens, or None: share none of them.

        None while a fault is set, while smoothing makes a token's experts depend on those of the
        token before it, while rows may be dropped or get their number format for the sake of others
        in their step, or under a table that was kept although its canary failed. What was computed
        before a fault is not used after it, for a fault may have changed weights.
        """
        in_force, canary = self._in_force, self._canary or _EQUAL
        policy = in_force.policy
        if policy.smoothing or policy.capacity_factor is not None:
            return None
        if policy.precision.mode == "auto":
            return None
        if self._faults.active() or not canary["equal"]:
            return None
        return f"{self._times_broken} {in_force.words}".encode()

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

    def publish_table(self, table: RoutingTable) -> None:
        """Let the next step read `table`; on several ranks, once all have gathered its experts.

        Raises:
            RoutingError: it is no table, its shape does not fit the model, or its version is not
                newer.
        """
        if not isinstance(table, RoutingTable):
            raise RoutingError(f"table ({table!r:.80}) must be a RoutingTable.")
        current = self._table
        shape = (table.num_layers, table.num_experts, table.num_devices)
        wanted = (current.num_layers, current.num_experts, current.num_devices)
        if shape != wanted:
            raise RoutingError(
                f"table version {table.version} is for (layers, experts, devices) {shape}; this "
                f"engine runs {wanted}."
            )
        version = table.version
        self._check_newer(version)
        if (fault := self._faults.table_publish) is not None:
            table = fault(table)  # without the lock: it may wait, and the steps must not
        with self._lock:
            self._check_newer(version)
            if self._door.stages:
                self._door.orders.append(Order("publish_table", table))
                return
        self.published(table)

    def published(
        self,
        table: RoutingTable,
        *,
        from_ranks: int = 0,
        from_host: int = 0,
        from_checkpoint: int = 0,
        seconds: float = 0.0,
        canary: dict[str, Any] | None = None,
    ) -> None:
        """Take up a table that every rank is ready for; called by the engine.

        Args:
            table: the table of the next step.
            from_ranks: bytes of experts that went from rank to rank for it.
            from_host: bytes of experts that no rank had and the host had a copy of.
            from_checkpoint: bytes of experts that nobody had.
            seconds: how long that took.
            canary: what the canary found, see `engine.runtime.canary.Verdict`; None in one process,
                where a table moves no weight.
        """
        with self._lock:
            self._table, self._canary = table, canary
            self._changes += 1
        self._say(
            "publish_table",
            version=table.version,
            sha256=table.sha256(),
            rank_of_phy=table.rank_of_phy.tolist(),
            num_bytes=from_ranks + from_host + from_checkpoint,
            from_ranks=from_ranks,
            from_host=from_host,
            from_checkpoint=from_checkpoint,
            seconds=seconds,
            canary=canary,
        )

    def gave_up(self, version: int, why: str) -> None:
        """Say that a table was not published and the old one stays; called by the engine."""
        self._say("give_up_table", version=version, why=why)

    def drain(self, rank: int) -> None:
        """Move everything off a rank, then end its process; its requests go on elsewhere.

        Raises:
            RoutingError: this engine has no such rank, or no other one.
        """
        self._order_rank("drain", rank)

    def add_rank(self, rank: int) -> None:
        """Start a rank that was drained or lost, and let it take part again.

        Raises:
            RoutingError: this engine has no place for such a rank.
        """
        self._order_rank("add_rank", rank)

    def recovered(
        self,
        table: RoutingTable,
        lost: Mapping[int, str],
        members: Sequence[int],
        epoch: int,
        seconds: float,
        reason: str,
        counts: Mapping[str, int],
    ) -> None:
        """Take up the table of those ranks that are left; called by the recovery alone.

        `counts` says how many rows of the step that failed run again (`rows_again`), and how many
        bytes of experts came from where for it, by the names of `published`.
        """
        with self._lock:
            self._table = table
            self._changes += 1
        self._say(
            "recover",
            lost=dict(lost),
            members=list(members),
            epoch=epoch,
            seconds=seconds,
            reason=reason,
            version=table.version,
            **counts,
        )

    def inject(self, point: str, fault: Fault, lease_s: float, *, rank: int | None = None) -> None:
        """Set `fault` at `point`; it heals by itself after `lease_s` seconds.

        Args:
            point: one of `engine.faults.POINTS`.
            fault: takes the value there and returns the one to go on with.
            lease_s: seconds.
            rank: on an engine with ranks, the only one to set it on; None sets it on all.

        Raises:
            FaultError: the point is unknown or for drills only, the fault cannot be called, or it
                cannot travel to another process, or the lease is not a positive number of seconds.
            ConfigError: no such rank.
        """
        if not is_number(lease_s) or not 0 < lease_s <= 86400:
            raise FaultError(f"lease_s ({lease_s!r}) must be above 0 and at most 86400 seconds.")
        if point in ONLY_IN_DRILLS and not self._door.drill:
            raise FaultError(
                f"{point} can only be broken in a drill; open the engine with "
                "EngineConfig(drill=True)."
            )
        if rank is not None:
            within("rank", rank, 0, self._door.num_ranks - 1)
        if self._door.stages:
            check_travels(fault)
        with self._lock:
            self._changes += 1
            self._times_broken += 1
            self._faults.set(point, fault)
            self._leases[point] = time.monotonic() + lease_s
            if self._door.stages:
                self._door.orders.append(Order("set_fault", (point, fault, rank)))
        self._say("inject", point=point, lease_s=lease_s, rank=rank)

    def clear(self, point: str) -> None:
        """Heal `point`; healing a healthy point is fine.

        Raises:
            FaultError: the point is unknown.
        """
        with self._lock:
            self._changes += 1
            self._faults.clear(point)
            self._leases.pop(point, None)
            if self._door.stages:
                self._door.orders.append(Order("set_fault", (point, None, None)))
        self._say("clear", point=point)

    def end_leases(self) -> None:
        """Heal the faults whose lease is over; the engine calls this before each step."""
        if not self._leases:
            return
        now = time.monotonic()
        with self._lock:
            for point in [point for point, end in self._leases.items() if end <= now]:
                self.clear(point)

    def state(self) -> dict[str, Any]:
        """Return what is in force: table, what its canary found, policy, fault points, load."""
        return {
            "table_version": self._table.version,
            "table_sha256": self._table.sha256(),
            "rank_of_phy": self._table.rank_of_phy.tolist(),
            "canary": self._canary,
            **in_words(self.policy),
            "faults": list(self._faults.active()),
            **self._stats().as_dict(),
        }

    def set_exchange(self, mode: str) -> None:
        """Exchange rows between ranks by `mode` from the next step on.

        Raises:
            RoutingError: this engine runs in one process.
            ConfigError: no such mode.
        """
        one_of("exchange", mode, EXCHANGES)
        self._order("set_exchange", mode)
        self._say("set_exchange", mode=mode)

    def _order_rank(self, action: str, rank: int) -> None:
        within("rank", rank, 0, self._door.num_ranks - 1)
        self._order(action, rank)
        self._say(action, rank=rank)

    def _order(self, action: str, value: Any) -> None:
        if not self._door.stages:
            raise RoutingError(f"{action} needs ranks, but this engine runs in one process.")
        self._door.orders.append(Order(action, value))

    def _change(self, change: Callable[[RoutingPolicy], RoutingPolicy]) -> None:
        with self._lock:
            policy = change(self.policy)
            if policy.capacity_factor is not None and self._door.deterministic:
                raise RoutingError(NOT_DETERMINISTIC.format(policy.capacity_factor))
            self._in_force = InForce.of(policy)
            self._changes += 1

    def _check_newer(self, version: int) -> None:
        if version <= self._table.version:
            raise RoutingError(
                f"table version ({version}) must be above the current one ({self._table.version})."
            )

    def _say(self, action: str, **detail: Any) -> None:
        if self._sink.enabled:
            self._sink.emit(ControlEvent(action, detail, self._table.version, time.time()))


_EQUAL = {"equal": True}
"""What a canary would say of a table that had none."""
