"""Go on without the ranks that are gone, and lose no request.

What is lost with a rank: its cache, hence the sequences that lived there start again from their
tokens so far; and its experts, hence the survivors read them from their own replicas or from the
checkpoint. The step that failed counts for nobody.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from engine.cluster.launch import RankLostError, Ranks
from engine.errors import RankError
from engine.routing.survivors import without
from engine.routing.table import RoutingTable
from engine.runtime.control import Control
from engine.runtime.scheduler import Schedule, Scheduler

MAX_FAILURES = 3
"""Failures in a row without a rank lost before the engine gives up."""


@dataclass(slots=True)
class Recovery:
    """Brings an engine on ranks back after a step has failed."""

    ranks: Ranks
    scheduler: Scheduler
    control: Control
    _failures: int = 0

    def succeeded(self) -> None:
        """Note that a step went well."""
        self._failures = 0

    def after(self, error: RankLostError, schedule: Schedule) -> None:
        """Make one group of those that are left and send everybody's work to them.

        Raises:
            RankError: no rank is left, or steps keep failing although all ranks live.
        """
        started = time.perf_counter()
        self._failures += 1
        if self._failures > MAX_FAILURES and not error.lost:
            raise RankError(f"{self._failures} steps in a row failed: {error}") from error
        for chunk in schedule.chunks:
            chunk.sequence.extra_rows["recovery"] += chunk.num_tokens
        lost = dict(error.lost)
        self.ranks.expel(error.lost)
        table = self._regroup(lost)
        self._move_homes()
        seconds = time.perf_counter() - started
        self.control.recovered(table, lost, self.ranks.members, self.ranks.epoch, seconds, error)

    def _regroup(self, lost: dict[int, str]) -> RoutingTable:
        """Join the survivors under a table of their own; more may die while they join."""
        table = self.control.table
        while True:
            members = self.ranks.members
            if not members:
                reasons = ", ".join(f"rank {rank} {why}" for rank, why in lost.items())
                raise RankError(f"no rank is left: {reasons}; start the engine again.")
            if not set(table.rank_of_phy.tolist()) <= set(members):
                table = without(table, members)
            try:
                self.ranks.join(table)
                return table
            except RankLostError as again:
                if not again.lost:
                    raise
                lost.update(again.lost)
                self.ranks.expel(again.lost)

    def _move_homes(self) -> None:
        """Spread the sequences of lost ranks over the others; they start again there."""
        members = self.ranks.members
        waiting, running = list(self.scheduler.waiting), list(self.scheduler.running)
        for turn, sequence in enumerate([*reversed(running), *waiting]):
            if sequence.home not in members:
                self.scheduler.move(sequence, members[turn % len(members)])
