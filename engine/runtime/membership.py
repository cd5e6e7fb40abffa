"""Who takes part: go on without ranks that are gone, drain one, let one join, lose no request.

What is lost with a rank: its cache, hence the sequences that lived there start again from their
tokens so far; and its experts, hence the survivors take them from their own replicas, from the
host's copies or from the checkpoint. The step that failed counts for nobody.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, dataclass

from engine.cluster.launch import RankLostError, Ranks
from engine.cluster.messages import SetFault
from engine.errors import RankError
from engine.routing.survivors import Roles, levelled, without
from engine.routing.table import RoutingTable
from engine.runtime.control import Control
from engine.runtime.door import Order
from engine.runtime.migration import Migration
from engine.runtime.ranked import RankedRunner
from engine.runtime.scheduler import Schedule, Scheduler

MAX_FAILURES = 3
"""Failures in a row without a rank lost before the engine gives up."""


@dataclass(slots=True)
class Membership:
    """Decides, between steps, which ranks take part."""

    ranks: Ranks
    runner: RankedRunner
    scheduler: Scheduler
    control: Control
    migration: Migration
    orders: deque[Order]
    roles: Roles
    _failures: int = 0

    def before_step(self) -> None:
        """Do what operators have ordered, and take up a table that is ready.

        Raises:
            RankLostError: a rank died or froze meanwhile.
            RankError: an order cannot be followed.
        """
        while self.orders:
            order = self.orders.popleft()
            if order.action == "publish_table":
                self._publish(order.value)
            elif order.action == "set_fault":
                point, fault, rank = order.value
                told = self.ranks.members if rank is None else {rank} & {*self.ranks.members}
                self.ranks.ask(dict.fromkeys(told, SetFault(point, fault)))
            elif order.action == "set_exchange":
                self.runner.exchange = order.value
            elif order.action == "drain":
                self._drain(order.value)
            else:
                self._add(order.value)
        self.migration.advance()

    def succeeded(self) -> None:
        """Note that a step went well."""
        self._failures = 0

    def after(self, error: RankLostError, schedule: Schedule | None = None) -> None:
        """Make one group of those that are left and send everybody's work to them.

        Args:
            error: who is lost.
            schedule: the step that failed, if it was in one.

        Raises:
            RankError: no rank is left, or steps keep failing although all ranks live.
        """
        started = time.perf_counter()
        self._failures += 1
        if self._failures > MAX_FAILURES and not error.lost:
            raise RankError(f"{self._failures} steps in a row failed: {error}") from error
        rows_again = 0
        for chunk in schedule.chunks if schedule else ():
            chunk.sequence.extra_rows["recovery"] += chunk.num_tokens
            rows_again += chunk.num_tokens
        self.migration.cancel("ranks were lost while it was under way")
        lost = dict(error.lost)
        self.ranks.expel(error.lost)
        table, fetched = self._regroup(lost)
        self._move_homes()
        seconds = time.perf_counter() - started
        counts = {"rows_again": rows_again, **fetched}
        self.control.recovered(
            table, lost, self.ranks.members, self.ranks.epoch, seconds, str(error), counts
        )

    def _publish(self, table: RoutingTable) -> None:
        if strangers := set(table.rank_of_phy.tolist()) - set(self.ranks.members):
            self.control.gave_up(table.version, f"rank {min(strangers)} does not take part")
        else:
            self.migration.begin(table)

    def _drain(self, rank: int) -> None:
        others = [member for member in self.ranks.members if member != rank]
        if rank not in self.ranks.members or not others:
            return
        self.migration.cancel(f"rank {rank} is drained")
        now = self.control.table
        if rank in now.rank_of_phy:
            # While it still takes part, so that its experts go from rank to rank.
            table = without(now, self.roles.holders(others))
            self.ranks.join(now, table)
            self.control.published(table)
        self.ranks.stop(rank)
        self._regroup({})
        self._move_homes()

    def _add(self, rank: int) -> None:
        if rank in self.ranks.members:
            return
        self.migration.cancel(f"rank {rank} joins")
        self.ranks.start([rank], self.control.table)
        (table, _), holders = self._regroup({}), self.roles.holders(self.ranks.members)
        self.control.publish_table(levelled(table, holders))

    def _regroup(self, lost: dict[int, str]) -> tuple[RoutingTable, dict[str, int]]:
        """Join the ranks that live under a table of their own; more may die while they join.

        Returns the table, and the bytes of experts that were fetched for it, by where from.
        """
        now = table = self.control.table
        while True:
            members = self.ranks.members
            if not members:
                reasons = ", ".join(f"rank {rank} {why}" for rank, why in lost.items())
                raise RankError(f"no rank is left: {reasons}; start the engine again.")
            if not set(table.rank_of_phy.tolist()) <= set(members):
                table = without(table, self.roles.holders(members))
            try:
                told = [asdict(one) for one in self.ranks.join(now, table).values()]
                return table, {name: sum(one[name] for one in told) for name in told[0]}
            except RankLostError as again:
                if not again.lost:
                    raise
                lost.update(again.lost)
                self.ranks.expel(again.lost)

    def _move_homes(self) -> None:
        """Spread the sequences of ranks that are gone over the others; they start again there."""
        members, homes = self.ranks.members, self.roles.homes(self.ranks.members)
        living = [*self.scheduler.running, *self.scheduler.waiting]
        for turn, sequence in enumerate(living):
            if sequence.home not in members:
                self.scheduler.move(sequence, homes[turn % len(homes)])
        for rank in {*range(len(self.scheduler.pools))} - {*members}:
            self.scheduler.forget(rank)
