"""What a drill's method and rollbacks do to a deployment, and where actions are declared.

Nothing here is ever read by a check. Every fault set has a lease, after which the engine heals it
by itself; what a fault leaves behind (a torn table, a damaged file, a dead rank) is put back by
`restore`, which every drill's rollbacks call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.faults import Fault
from engine.routing.balance import replicated
from engine.routing.table import RoutingTable
from workbench.drills.deployment import Deployment

if TYPE_CHECKING:
    from engine.runtime.control import Control
    from workbench.drills.scenario import Call
    from workbench.trace.schema import Array


class Target:
    """What a drill may break, and what the frame knows of it."""

    def __init__(self, deployment: Deployment, rng: np.random.Generator, lease_s: float) -> None:
        """Take a deployment whose engine runs and is healthy.

        Args:
            deployment: the drill's own.
            rng: from the drill's seed: which layer, which expert, which rank.
            lease_s: how long a fault may last.
        """
        self.deployment, self.rng, self.lease_s = deployment, rng, lease_s
        self.snapshot: RoutingTable = deployment.require().table
        """The table from before the drill."""
        self.planned: list[dict[str, Any]] = []
        """The change record: version and hash of every table as it was planned, newest last."""
        self.choose_traffic: Callable[..., None] = lambda **changes: None
        """Changes what is asked of the engine, see `Evidence.choose`."""
        self.run: Callable[[float], None] = lambda seconds: None
        """Runs traffic for so many seconds."""
        self._note(self.snapshot)

    @property
    def control(self) -> Control:
        """The running engine's."""
        return self.deployment.require().control

    def publish(self, table: RoutingTable) -> None:
        """Publish a table and write it into the change record as it was meant to be."""
        self._note(table)
        self.control.publish_table(table)

    def plan(self, load_LE: Array, spare: int) -> None:
        """Publish a table planned for a load (L, E)."""
        now = self.control.table
        self.publish(replicated(load_LE, now.num_devices, version=now.version + 1, spare=spare))

    def started_over(self) -> None:
        """Write the table of an engine that was started anew into the change record."""
        self._note(self.control.table)

    def inject(self, point: str, fault: Fault, rank: int | None = None) -> None:
        """Set a fault that outlives restarts, until its lease is over."""
        self.deployment.inject(point, fault, self.lease_s, rank=rank)

    def _note(self, table: RoutingTable) -> None:
        self.planned.append({"version": table.version, "sha256": table.sha256()})


ACTIONS: dict[str, Callable[..., None]] = {}
"""By name, as drill files call them."""


def action(function: Callable[..., None]) -> Callable[..., None]:
    """Declare a function of a `Target` as an action that drill files may call by its name."""
    ACTIONS[function.__name__] = function
    return function


@action
def restore(target: Target) -> None:
    """Put back everything a drill or a learner may have changed."""
    target.deployment.restore()
    target.control.clear_policy()
    before, now = target.snapshot, target.control.table
    if target.deployment.is_ranked:
        return  # `Deployment.restore` has started the ranks anew if the table was another
    table = RoutingTable(
        version=now.version + 1,
        phy2log=before.phy2log,
        log2phy=before.log2phy,
        num_replicas=before.num_replicas,
        rank_of_phy=before.rank_of_phy,
        num_devices=before.num_devices,
    )
    target.publish(table)


def undone(rollbacks: Sequence[Call]) -> Iterator[str]:
    """Yield what is missing among the rollbacks, one sentence each."""
    if "restore" not in {call.func for call in rollbacks}:
        yield "rollbacks must call restore: it puts back what was broken, and what a learner did."
