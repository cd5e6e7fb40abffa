"""One drill on one engine: steady, broken, repaired or not, graded, restored.

The session owns the engine's steps while it runs; everything here happens on the thread that calls
it. A host process puts it behind a socket (`workbench.drills.host`), tests and rehearsals call it
directly.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.drills.acts import Hands, perform
from workbench.drills.breaks import ACTIONS, Target
from workbench.drills.checks import judge, measure
from workbench.drills.course import SAMPLE_EVERY_S, Course
from workbench.drills.deployment import Deployment
from workbench.drills.evidence import Evidence
from workbench.drills.observation import seen
from workbench.drills.proof import compared, hashes
from workbench.drills.readings import MEANINGS, Readings, TooLittle
from workbench.drills.scenario import Call, Scenario
from workbench.drills.stages import Tell, untold
from workbench.drills.window import Window

if TYPE_CHECKING:
    from engine import Engine


class Session(Course):
    """A drill under way on an engine of its own."""

    def __init__(
        self,
        scenario: Scenario,
        deployment: Deployment,
        window: Window,
        *,
        seed: int | None = None,
        minutes: float | None = None,
        surprise: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take an engine that records into `window`, discreetly; nothing runs yet.

        Args:
            scenario: the drill.
            deployment: fresh and open, made for this drill.
            window: what the engine's sink passes `discreet` events to.
            seed: in place of the scenario's: another layer, another expert.
            minutes: in place of the scenario's: how long the fault may last.
            surprise: whether the drill's title is kept back, as in an incident.
            clock: monotonic seconds.
        """
        super().__init__(scenario, seed=seed, minutes=minutes, surprise=surprise, clock=clock)
        self.deployment, self.window = deployment, window
        self._undo: list[Call] = []
        deployed = scenario.deployed
        self._target = Target(deployment, np.random.default_rng(self.seed), self.minutes * 60)
        self._evidence = Evidence(
            deployment,
            window,
            self._target.planned,
            running=deployed.running,
            domain=deployed.domain,
            sampled=deployed.sampled,
            guest=deployed.guest,
            beginnings=deployed.beginnings,
            seed=self.seed,
        )
        self._target.choose_traffic = self._evidence.choose
        self._target.run = self._evidence.run
        self._evidence.plan = self._target.plan
        deployment.on_start = self._target.started_over

    @property
    def engine(self) -> Engine:
        """The running engine; a RequestError if there is none."""
        return self.deployment.require()

    # ---- the drill's course

    def prepare(self, tell: Tell = untold) -> None:
        """Warm up, hold the steady state against its tolerances, take the snapshot.

        Args:
            tell: is told each of `stages.STAGES` that this goes through.

        Raises:
            MachineError: the engine is not steady; nothing was broken.
        """
        cold = bool(self.scenario.deployed.beginnings)
        rows = self._needed_rows() * (1 if cold else 2)
        self._evidence.gather(rows, lambda have: tell("traffic", have, rows))
        if self._has_too_little():
            self._evidence.gather(5 * rows // 4)
        tell("answers", 0, 0)
        self._evidence.write_down_answers()
        if cold:  # the first of each beginning found nothing yet
            self._evidence.clear()
            self._evidence.gather(rows)
        self._measure_steady(self.readings(), tell)
        self.snapshot()

    def snapshot(self) -> None:
        """Take the hashes that the engine must have again at the end."""
        self.hashes = hashes(self.deployment)
        self._target.snapshot = self.engine.table
        self._note("steady", values=dict(self.steady), hashes=dict(self.hashes))

    def break_it(self) -> None:
        """Register the undo, then run the method; the lease runs from here."""
        self._undo = list(self.scenario.rollbacks)
        self._note("undo registered", actions=[call.name for call in self._undo])
        self._time_counts_from_now()
        for call in self.scenario.method:
            ACTIONS[call.func](self._target, **call.arguments)
            self._evidence.settle()
        self._note("started", lease_s=self.minutes * 60)
        self.phase = "running"
        self._evidence.clear()

    def step(self) -> bool:
        """Run one step of traffic and look at the clock; False when the drill has ended."""
        if self.phase != "running":
            return False
        self._evidence.step()
        if self._clock() - self._began >= self.minutes * 60:
            self.finish("the time is up")
        elif self._clock() - self._sampled_at >= SAMPLE_EVERY_S:
            self._sample()
        return self.phase == "running"

    # ---- what a learner asks for

    def observe(self) -> dict[str, Any]:
        """Measure every signal now, and show load, table and policy as an operator sees them."""
        self._gather()
        readings = self.readings()
        return {
            "signals": [
                judge(probe, readings, self.steady).as_dict() for probe in self.scenario.signals
            ],
            "acts": len(self.acts),
            **seen(self.deployment, readings, self._evidence),
        }

    def act(self, name: str, /, **arguments: Any) -> dict[str, Any]:
        """Change the engine as an operator would.

        Raises:
            ConfigError: there is no such act, or its arguments do not fit it.
            RequestError: the drill has ended.
            RoutingError: the engine refused.
        """
        self._require_running()
        hands = Hands(
            self.deployment,
            self._target.publish,
            self._evidence.gather,
            self.window.trace,
            self._evidence.refuse,
        )
        done = perform(name, arguments, hands, self.window.trace())
        self.acts.append({"act": name, **arguments})
        self._note("act", act=name, arguments=arguments, said=done)
        self._evidence.settle(ordered=True)
        self._evidence.warm_up()
        self._evidence.clear()
        return {"said": done}

    def restore(self) -> dict[str, Any]:
        """Undo everything and compare hashes with the snapshot; again does no harm."""
        for call in self._undo:
            ACTIONS[call.func](self._target, **call.arguments)
        after = hashes(self.deployment)
        proof = compared(self.hashes or after, after)
        self._note("restored", restored=proof["restored"])
        return proof

    def readings(self) -> Readings:
        """Return what an operator has before them now."""
        return self._evidence.readings()

    @property
    def table_version(self) -> int | None:
        """The version of the table in force; None while no engine runs."""
        engine = self.deployment.engine
        return engine.table.version if engine is not None else None

    # ---- inside

    def _gather(self) -> None:
        rows = self._needed_rows()
        self._evidence.gather(rows)
        if self._has_too_little():
            self._evidence.gather(2 * rows)

    def _has_too_little(self) -> bool:
        """Return whether some probe wants to see more, as of steps that only decode."""
        readings = self.readings()
        live = [probe for probe in self.scenario.probes if MEANINGS[probe.call.func].live]
        for probe in live:
            try:
                measure(probe, readings)
            except TooLittle:
                return True
            except Exception:  # whoever judges it says what is wrong
                continue
        return False
