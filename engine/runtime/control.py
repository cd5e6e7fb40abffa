"""The one door for operators, the dashboard and drills.

Policies and tables are immutable and swapped by one reference, which each step reads once, so these
calls may come from any thread and never meet half of a change; a lock keeps two callers from
undoing each other's. Everything done here is an event. A `layer` is an index among the MoE layers,
the L axis of tables and policies; what is refused changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.config import EXCHANGES, one_of, within
from engine.errors import FaultError, RoutingError
from engine.events import Sink
from engine.faults import ONLY_IN_DRILLS, Fault, Faults
from engine.routing.policy import RoutingPolicy
from engine.routing.table import RoutingTable
from engine.runtime.arguments import check_travels, is_number
from engine.runtime.door import Door, Order, in_words
from engine.runtime.policies import PolicyControl
from engine.runtime.results import EngineStats


class Control(PolicyControl):
    """Changes a running engine between its steps; what decides experts is `PolicyControl`'s."""

    def __init__(
        self,
        table: RoutingTable,
        policy: RoutingPolicy,
        faults: Faults,
        sink: Sink,
        stats: Callable[[], EngineStats],
        door: Door | None = None,
    ) -> None:
        super().__init__(table, policy, sink, door or Door())
        self._faults, self._stats = faults, stats
        self._times_broken = 0
        self._canary: dict[str, Any] | None = None
        self._leases: dict[str, float] = {}

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

    def _check_newer(self, version: int) -> None:
        if version <= self._table.version:
            raise RoutingError(
                f"table version ({version}) must be above the current one ({self._table.version})."
            )


_EQUAL = {"equal": True}
"""What a canary would say of a table that had none."""
