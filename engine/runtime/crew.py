"""Run the steps in other processes: the ranks, how a step is spread over them, and who takes part.

To the engine it is what `engine.runtime.runner.Runner` is in one process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from engine.cluster.launch import RankLostError, Ranks
from engine.cluster.messages import Ask
from engine.config import EngineConfig, ModelConfig
from engine.faults import Faults
from engine.model.step import StageClock
from engine.routing.survivors import Roles
from engine.runtime.canary import Canary
from engine.runtime.control import Control
from engine.runtime.door import Door
from engine.runtime.membership import Membership
from engine.runtime.migration import Migration
from engine.runtime.ranked import RankedRunner
from engine.runtime.runner import StepResult, Terms
from engine.runtime.scheduler import Schedule, Scheduler


class Crew:
    """The ranks of one engine, and what keeps its steps going when one of them is lost."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        num_positions: int,
        *,
        scheduler: Scheduler,
        control: Control,
        door: Door,
        roles: Roles,
        faults: Faults,
    ) -> None:
        """Start all ranks.

        Raises:
            RankError: one could not start; all are ended then.
        """
        self._ranks = ranks = Ranks(config, num_positions, control.table)
        self._runner = runner = RankedRunner(ranks, config)
        canary = Canary(runner, config, model)
        migration = Migration(ranks, control, canary, faults, config.migration_deadline_s)
        self._membership = Membership(
            ranks, runner, scheduler, control, migration, door.orders, roles
        )

    @property
    def members(self) -> Iterable[int]:
        """The ranks that live."""
        return self._ranks.members

    @property
    def pids(self) -> Mapping[int, int]:
        """The process id of each living rank."""
        return {rank: self._ranks.pid(rank) for rank in self._ranks.members}

    def before_step(self) -> None:
        """Do what operators have ordered; take up a table that is ready."""
        try:
            self._membership.before_step()
        except RankLostError as error:
            self._membership.after(error)

    def run(self, schedule: Schedule, terms: Terms, clock: StageClock) -> StepResult | None:
        """Run the chunks of `schedule`, each on the rank its sequence lives on.

        Returns:
            None when ranks were lost: nothing of the step counts, and its sequences wait again.

        Raises:
            RankError: no rank is left, or steps keep failing although all ranks live.
        """
        try:
            result = self._runner.run(schedule, terms, clock)
        except RankLostError as error:
            self._membership.after(error, schedule)
            return None
        self._membership.succeeded()
        return result

    def weights_sha256(self) -> str:
        """Hash every rank's parameters as they stand in memory."""
        shares = self._ranks.ask_all(Ask("weights_sha256"))
        return hashlib.sha256(repr(sorted(shares.items())).encode()).hexdigest()

    def census(self) -> dict[int, dict[str, int]]:
        """Ask each rank for its `resident_bytes` and the `collectives` it has joined."""
        names = ("resident_bytes", "collectives")
        found = {name: self._ranks.ask_all(Ask(name)) for name in names}
        return {rank: {name: found[name][rank] for name in names} for rank in self._ranks.members}

    def close(self) -> None:
        """End all ranks."""
        self._ranks.close()
