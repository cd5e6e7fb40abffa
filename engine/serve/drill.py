"""A drill on a service that others use: one delay, on a lease that puts everything back.

`begin` writes down what is in force and hashes it, then sets one safe fault. Whoever began must
`extend` the lease again and again. When they say `end`, or fall silent, the service itself heals
the fault and puts back what was changed since, by whomever: policy, exchange, ranks, table. Hashes
from before and after say whether that went well.

All of it runs on the engine's thread, so nothing here takes a lock. Hashing the weights keeps the
steps waiting, about a second for each gigabyte of them. A drill is no secret: `/v1/status` and
`/v1/control/state` say that one is under way.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from dataclasses import dataclass, replace
from typing import Any

from engine.errors import FaultError
from engine.faults import SafeFault
from engine.routing.policy import RoutingPolicy
from engine.routing.table import RoutingTable
from engine.runtime.door import in_words
from engine.runtime.engine import Engine
from engine.serve.health import Health

log = logging.getLogger("engine.serve")

MOST_S = 600.0
"""Longest drill: the fault's own lease, which ends it even if this here fails."""
MOST_LEASE_S = 60.0
"""Longest time a drill goes on without its runner."""
RESTORE_S = 60.0
"""Longest time ranks and table may take to be as before."""
RETRY_S = 3.0


@dataclass(slots=True)
class Held:
    """The drill under way, and what was in force before it."""

    drill: str
    lease: str
    """Known to whoever began it, and to nobody else."""
    point: str
    until: float
    """Monotonic seconds."""
    table: RoutingTable
    policy: RoutingPolicy
    exchange: str
    ranks: frozenset[int]
    before: dict[str, str]
    ending: str = ""
    """Why it ends; empty while it goes on."""
    give_up_at: float = 0.0
    try_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How the last drill ended."""

    drill: str
    lease: str
    how: str
    before: dict[str, str]
    after: dict[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Return what whoever began it is told."""
        return {
            "drill": self.drill,
            "how": self.how,
            "restored": self.before == self.after,
            "before": self.before,
            "after": self.after,
        }


class DrillHold:
    """Holds one service for one drill at a time."""

    def __init__(self, health: Health) -> None:
        self._health = health
        self._held: Held | None = None
        self._ended: Ended | None = None

    def facts(self) -> dict[str, Any] | None:
        """Return which drill is under way, for how long yet; None if none is; from any thread."""
        if (held := self._held) is None:
            return None
        left_s = max(0.0, held.until - time.monotonic())
        return {"drill": held.drill, "left_s": round(left_s, 1), "ending": held.ending or None}

    def check_free(self) -> None:
        """Refuse what must not be done beside a drill.

        Raises:
            FaultError: a drill is under way.
        """
        if (held := self._held) is not None:
            raise FaultError(
                f"the drill {held.drill} is under way here; wait for its end, or end it with "
                "end_drill."
            )

    def begin(
        self,
        engine: Engine,
        drill: str,
        fault: SafeFault,
        delay_ms: float,
        lease_s: float,
        rank: int | None,
    ) -> dict[str, Any]:
        """Write down what is in force, then set the fault.

        Returns:
            `lease`, which `extend` and `end` ask for, and `hashes`.

        Raises:
            FaultError: another drill is under way, a fault is set, a rank is missing, or the delay
                or the rank is out of bounds. Nothing has changed then.
        """
        self.check_free()
        control = engine.control
        if points := engine.faults.active():
            raise FaultError(f"a fault is set here already, at {points[0]}; clear it first.")
        ranks = frozenset(engine.ranks)
        if missing := self._health.expected_ranks - ranks:
            raise FaultError(f"rank {min(missing)} is missing; a drill needs a healthy service.")
        if rank is not None and rank not in ranks:
            raise FaultError(f"rank ({rank}) does not take part in this service.")
        delay, held = fault.of(delay_ms), self._written_down(engine, drill, fault, lease_s)
        self._held = held  # before the fault: from here on somebody puts it back
        try:
            control.inject(fault.point, delay, MOST_S, rank=rank)
        except BaseException:
            self._held = None
            raise
        log.warning("the drill %s has begun at %s", drill, fault.point)
        return {"lease": held.lease, "lease_s": lease_s, "hashes": held.before}

    def extend(self, lease: str, lease_s: float) -> dict[str, Any]:
        """Let a drill go on for so long from now.

        Raises:
            FaultError: no such drill is under way, or it is ending.
        """
        held = self._held
        if held is None or held.ending or not secrets.compare_digest(held.lease, lease):
            raise FaultError("no drill of this lease is under way; begin one.")
        held.until = time.monotonic() + lease_s
        return {"drill": held.drill, "left_s": lease_s}

    def end(self, engine: Engine, lease: str | None) -> None:
        """Begin to put everything back; without a lease whatever drill is under way.

        Raises:
            FaultError: no such drill is under way, and it was not the last one either.
        """
        held = self._held
        if held is not None and (lease is None or secrets.compare_digest(held.lease, lease)):
            self._end(engine, held, "ended" if lease else "ended by an operator")
        elif self.how_it_ended(lease) is None:
            raise FaultError("no drill of this lease is under way.")

    def how_it_ended(self, lease: str | None) -> dict[str, Any] | None:
        """Return how a drill ended, if nothing of it is left; None without a lease is the last."""
        last = self._ended
        if self._held is not None and lease in (None, self._held.lease):
            return None
        if last is None or lease is not None and not secrets.compare_digest(last.lease, lease):
            return None
        return last.as_dict()

    def look(self, engine: Engine) -> None:
        """End a drill whose runner is silent; go on putting back; called twice a second."""
        if (held := self._held) is None:
            return
        if held.ending:
            self._put_back(engine, held)
        elif time.monotonic() >= held.until:
            self._end(engine, held, "its lease was over")

    # ---- inside, on the engine's thread

    def _written_down(self, engine: Engine, drill: str, fault: SafeFault, lease_s: float) -> Held:
        exchange = self._health.exchange or engine.config.exchange
        return Held(
            drill=drill,
            lease=secrets.token_hex(16),
            point=fault.point,
            until=time.monotonic() + lease_s,
            table=engine.table,
            policy=engine.control.policy,
            exchange=exchange,
            ranks=frozenset(engine.ranks),
            before=hashes(engine, exchange),
        )

    def _end(self, engine: Engine, held: Held, how: str) -> None:
        if held.ending:
            return
        held.ending, held.give_up_at = how, time.monotonic() + RESTORE_S
        engine.control.clear(held.point)
        engine.control.set_policy(held.policy)
        if engine.ranks and self._health.exchange not in (None, held.exchange):
            engine.control.set_exchange(held.exchange)
        self._put_back(engine, held)

    def _put_back(self, engine: Engine, held: Held) -> None:
        """Order what is still otherwise than before, and close the books once nothing is."""
        now = time.monotonic()
        same_ranks = frozenset(engine.ranks) == held.ranks
        if same_ranks and _contents(engine.table) == held.before["table"]:
            self._close(engine, held)
        elif now >= held.give_up_at:
            held.ending += ", and not all could be put back"
            self._close(engine, held)
        elif now >= held.try_at:
            held.try_at = now + RETRY_S
            self._order(engine, held)

    def _order(self, engine: Engine, held: Held) -> None:
        control, ranks = engine.control, frozenset(engine.ranks)
        for rank in held.ranks - ranks:
            control.add_rank(rank)
        for rank in ranks - held.ranks:
            control.drain(rank)
        if ranks == held.ranks:
            control.publish_table(replace(held.table, version=engine.table.version + 1))

    def _close(self, engine: Engine, held: Held) -> None:
        after = hashes(engine, self._health.exchange or engine.config.exchange)
        self._ended = Ended(held.drill, held.lease, held.ending, held.before, after)
        self._held = None
        log.warning("the drill %s has ended: %s", held.drill, held.ending)


def hashes(engine: Engine, exchange: str) -> dict[str, str]:
    """Return the SHA-256 of what the next step will stand on; on the engine's thread.

    `weights` as they lie in memory, `table` without its version, which only ever rises, `policy`,
    and `ranks` with how they exchange rows.
    """
    return {
        "weights": engine.weights_sha256(),
        "table": _contents(engine.table),
        "policy": _of(in_words(engine.control.policy)),
        "ranks": _of((sorted(engine.ranks), exchange)),
    }


def _contents(table: RoutingTable) -> str:
    return replace(table, version=0).sha256()


def _of(contents: object) -> str:
    return hashlib.sha256(repr(contents).encode()).hexdigest()
