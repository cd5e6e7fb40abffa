"""Carry a new routing table to all ranks: staged in the background, swapped between two steps.

Steps go on under the old table while the ranks gather their experts from one another. A rank that
is not ready in time costs the new table, never an answer: the old one stays in force and the next
may try again. So does a table under which the canary computes something else: it is taken back.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from engine.cluster.launch import Ranks
from engine.cluster.messages import Publish, Retract, Stage
from engine.exchange.plan import moves_between
from engine.faults import Faults
from engine.routing.table import RoutingTable
from engine.runtime.canary import Canary
from engine.runtime.control import Control


@dataclass(slots=True)
class Staging:
    """A table under way."""

    number: int
    table: RoutingTable
    started: float
    waiting: set[int]
    """Ranks that are not ready yet."""
    not_there: set[int]
    """Of those, the ranks others wait for."""
    from_ranks: int = 0
    from_host: int = 0
    from_checkpoint: int = 0


@dataclass(slots=True)
class Migration:
    """Moves one engine's ranks from table to table; one at a time, the latest asked for wins."""

    ranks: Ranks
    control: Control
    canary: Canary
    faults: Faults
    deadline_s: float
    _staging: Staging | None = None
    _begun: int = 0
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
        self._begun += 1
        moves = moves_between(self.control.table, table)
        self.ranks.ask_all(Stage(self._begun, table, moves))
        members = set(self.ranks.members)
        self._staging = Staging(self._begun, table, time.monotonic(), members, set(members))

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
            if said.number != staging.number:
                continue  # a straggler of one that was given up
            if said.error:
                self._give_up(f"rank {rank} could not gather its experts: {said.error}")
                return
            staging.not_there.discard(rank)
            if said.meets:
                continue
            staging.waiting.discard(rank)
            staging.from_ranks += said.from_ranks
            staging.from_host += said.from_host
            staging.from_checkpoint += said.from_checkpoint
        seconds = time.monotonic() - staging.started
        if not staging.waiting:
            self._swap(staging, seconds)
        elif seconds > self.deadline_s:
            late = ", ".join(str(rank) for rank in sorted(staging.not_there or staging.waiting))
            self._give_up(f"rank {late} was not ready within {self.deadline_s:g} s")

    def cancel(self, why: str) -> None:
        """Give up the table under way, if there is one."""
        if self._staging is not None:
            self._give_up(why)

    def _swap(self, staging: Staging, seconds: float) -> None:
        """Let all ranks read the new table, and take it back if the canary does not like it."""
        now, table = self.control.table, staging.table
        trial = self.canary.before(now, table)
        self.ranks.ask_all(Publish(staging.number))
        verdict = self.canary.after(trial, table)
        keep = verdict.equal
        if (fault := self.faults.table_unsafe_publish) is not None:
            keep = bool(fault(keep))
        if not keep:
            self.ranks.ask_all(Retract(now.version))
            self._give_up(f"the canary's logits changed: {verdict.reason}")
            return
        self._staging = None
        self.canary.kept(trial, verdict)
        self.control.published(
            table,
            from_ranks=staging.from_ranks,
            from_host=staging.from_host,
            from_checkpoint=staging.from_checkpoint,
            seconds=seconds,
            canary=verdict.as_dict(),
        )

    def _give_up(self, why: str) -> None:
        assert self._staging is not None
        version, self._staging = self._staging.table.version, None
        self._failures += 1
        self.control.gave_up(version, why)
