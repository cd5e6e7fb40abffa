"""Carry a new routing table to all ranks: staged in the background, swapped between two steps.

Steps go on under the old table while the ranks gather their experts. A rank that is not ready in
time costs the new table, never an answer: the old one stays in force and the next may try again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from engine.cluster.launch import Ranks
from engine.cluster.messages import Publish, Stage
from engine.routing.table import RoutingTable
from engine.runtime.control import Control


@dataclass(slots=True)
class Staging:
    """A table under way."""

    table: RoutingTable
    started: float
    waiting: set[int]
    """Ranks that are not ready yet."""
    num_bytes: int = 0


@dataclass(slots=True)
class Migration:
    """Moves one engine's ranks from table to table; one at a time, the latest asked for wins."""

    ranks: Ranks
    control: Control
    deadline_s: float
    _staging: Staging | None = None
    _failures: int = field(default=0)

    @property
    def is_under_way(self) -> bool:
        """Whether ranks are gathering the experts of a table to come."""
        return self._staging is not None

    @property
    def failures(self) -> int:
        """How many tables were given up."""
        return self._failures

    def begin(self, table: RoutingTable) -> None:
        """Ask every rank to gather the experts of `table`.

        Raises:
            RankLostError: a rank is dead or frozen.
        """
        self.ranks.ask_all(Stage(table))
        self._staging = Staging(table, time.monotonic(), set(self.ranks.members))

    def advance(self) -> None:
        """Between two steps: swap if all are ready, give up if it took too long.

        Raises:
            RankLostError: a rank is dead or frozen.
        """
        if (staging := self._staging) is None:
            return
        self.ranks.poll()
        while self.ranks.staged:
            rank, said = self.ranks.staged.pop()
            if said.table_version != staging.table.version:
                continue  # a straggler of one that was given up
            if said.error:
                self._give_up(f"rank {rank} could not gather its experts: {said.error}")
                return
            staging.waiting.discard(rank)
            staging.num_bytes += said.num_bytes
        seconds = time.monotonic() - staging.started
        if not staging.waiting:
            self.ranks.ask_all(Publish(staging.table.version))
            self._staging = None
            self.control.published(staging.table, staging.num_bytes, seconds)
        elif seconds > self.deadline_s:
            late = ", ".join(str(rank) for rank in sorted(staging.waiting))
            self._give_up(f"rank {late} was not ready within {self.deadline_s:g} s")

    def cancel(self, why: str) -> None:
        """Give up the table under way, if there is one."""
        if self._staging is not None:
            self._give_up(why)

    def _give_up(self, why: str) -> None:
        assert self._staging is not None
        version, self._staging = self._staging.table.version, None
        self._failures += 1
        self.control.gave_up(version, why)
