"""Whether the service can serve, and if not, why: what `/readyz` says.

A sink: which ranks should be there follows from what operators did, which are there from the
engine. Read from any thread.
"""

from __future__ import annotations

import multiprocessing
import threading
import time

from engine.events import ControlEvent, Event
from engine.runtime.engine import Engine

STAGES = ("configuration", "process group", "weights", "listening", "health check")


class Health:
    """What is known about the state of one service."""

    enabled = True

    def __init__(self, num_ranks: int) -> None:
        self.stage = 0
        """Stages of the start that are done."""
        self._expected = set(range(num_ranks)) if num_ranks > 1 else set[int]()
        self._living = set(self._expected)
        self._why: dict[int, str] = {}
        self._draining = False
        self._lock = threading.Lock()
        self.pids: dict[int, int] = {}
        """Process by rank; empty in one process."""
        self.table_since_s = time.time()
        """When the routing table in force was published."""
        self.exchange: str | None = None
        """How ranks exchange rows since an operator changed it; None until then."""
        self.communication_errors = 0
        """Ranks lost, recoveries and tables given up since the start."""

    @property
    def expected_ranks(self) -> frozenset[int]:
        """The ranks that should take part; empty in one process."""
        with self._lock:
            return frozenset(self._expected)

    @property
    def living_ranks(self) -> frozenset[int]:
        """Those that do, one that is about to leave included."""
        with self._lock:
            return frozenset(self._living)

    def emit(self, event: Event) -> None:
        """Follow what was done to the ranks and the table."""
        if not isinstance(event, ControlEvent):
            return
        with self._lock:
            rank = event.detail.get("rank")
            rank = -1 if rank is None else int(rank)
            if event.action == "drain" and len(self._expected) > 1:
                self._expected.discard(rank)
                self._why.pop(rank, None)
            elif event.action == "add_rank":
                self._expected.add(rank)
            elif event.action == "recover":
                self.communication_errors += max(1, len(event.detail["lost"]))
                self._why |= event.detail["lost"]
                self.table_since_s = event.time_s
            elif event.action == "give_up_table":
                self.communication_errors += 1
            elif event.action == "set_exchange":
                self.exchange = str(event.detail["mode"])
            elif event.action == "publish_table":
                self.table_since_s = event.time_s

    def look(self, engine: Engine) -> None:
        """See which ranks live; on the engine's thread."""
        ranks = engine.ranks
        if not ranks:
            return
        # Asking for the children also notices those that have died; no step needs to run for it.
        children = {child.pid for child in multiprocessing.active_children()}
        living = {rank for rank, pid in ranks.items() if pid in children}
        with self._lock:
            self._living, self.pids = living, {rank: ranks[rank] for rank in living}
            for rank in living:
                self._why.pop(rank, None)

    def drain(self) -> None:
        """Say that the service is ending."""
        self._draining = True

    def reason(self) -> str | None:
        """Return why the service is not ready; None when it is."""
        if self._draining:
            return "draining: running requests end, new ones are refused"
        if self.stage < len(STAGES):
            return f"starting: stage {self.stage + 1} of {len(STAGES)}, {STAGES[self.stage]}"
        with self._lock:
            missing = sorted(self._expected - self._living)
            if missing:
                rank = missing[0]
                why = self._why.get(rank, "is not there")
                more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
                return (
                    f"rank {rank} {why}{more}; bring it back with `workbench scale`, or scale down"
                )
        return None
