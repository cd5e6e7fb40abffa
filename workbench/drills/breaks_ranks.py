"""Faults of ranks: killed, frozen, slowed down, late, with a slow link. Real where they can be.

What is set inside a rank's process travels there, so it is a function of this module.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from workbench.drills.injector import Target, action
from workbench.drills.jobs import Job, Plan

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.trace.trace import Trace


@action
def kill_rank(target: Target) -> None:
    """End a rank's process with SIGKILL; which one is drawn by the seed."""
    os.kill(_pid(target), signal.SIGKILL)


@action
def freeze_rank(target: Target) -> None:
    """Stop a rank's process with SIGSTOP; which one is drawn by the seed."""
    os.kill(_pid(target), signal.SIGSTOP)


@action
def throttle_rank(target: Target, stopped_ms: float, running_ms: float) -> None:
    """Let a rank's process run for a part of the time only, by SIGSTOP and SIGCONT."""
    pid, over = _pid(target), threading.Event()
    until = time.monotonic() + target.lease_s

    def lives() -> bool:
        engine = target.deployment.engine
        return engine is not None and pid in engine.ranks.values()

    def throttle() -> None:
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < until and not over.is_set() and lives():
                os.kill(pid, signal.SIGSTOP)
                over.wait(stopped_ms / 1e3)
                os.kill(pid, signal.SIGCONT)
                over.wait(running_ms / 1e3)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=throttle, name="throttle", daemon=True)

    def heal() -> None:
        over.set()
        thread.join(2.0)

    target.deployment.undo_with(heal)
    thread.start()


@action
def slow_link(target: Target, every: int, sleep_ms: float) -> None:
    """Let one rank now and then send its rows late."""
    target.inject("dispatch.send", partial(_now_and_then, every, sleep_ms), _rank(target))


@action
def late_to_stage(target: Target, sleep_s: float) -> None:
    """Let one rank take long over gathering the experts of a new table."""
    target.inject("table.stage", partial(_late, sleep_s), _rank(target))


@action
def freeze_often(target: Target, after_rows: int) -> None:
    """Stop a rank's process some rows after every start, as a machine that stops now and then."""
    jobs = target.deployment.jobs
    jobs[FREEZER] = Freezer(FREEZER, target, after_rows)

    def heal() -> None:
        jobs.pop(FREEZER, None)

    target.deployment.undo_with(heal)


@action
def go_on(target: Target, seconds: float) -> None:
    """Let traffic run, so that what was set has something to act on."""
    target.run(seconds)


@action
def plan_uneven(target: Target) -> None:
    """Plan a table for a load of which one expert has most, as a planner would."""
    load_LE = np.ones((target.snapshot.num_layers, target.snapshot.num_experts))
    load_LE[:, int(target.rng.integers(load_LE.shape[1]))] = 6.0
    target.plan(load_LE, spare=1)


@action
def leave_scales(target: Target) -> None:
    """Let the scales of INT8 experts stay behind when they move, and nobody obey the canary."""
    target.inject("experts.prepare", _with_scales_of_the_next)
    target.inject("table.unsafe_publish", _keep)


@action
def heal(target: Target, points: Sequence[str]) -> None:
    """Heal fault points; what they left behind stays."""
    for point in points:
        target.deployment.heal(point)


FREEZER = "freezer"


class Freezer(Job):
    """Stops a rank once in each life of an engine; nobody sees it among the jobs."""

    hidden = True

    def __init__(self, name: str, target: Target, after_rows: int) -> None:
        super().__init__(name)
        self._target, self._after_rows = target, after_rows
        self._generation, self._seen = -1, 0

    def tick(self, trace: Callable[[], Trace], rows: int, plan: Plan) -> None:
        """Count rows, and stop a rank once there are enough."""
        deployment = self._target.deployment
        if deployment.generation != self._generation:
            self._generation, self._seen = deployment.generation, 0
        before, self._seen = self._seen, self._seen + rows
        if before < self._after_rows <= self._seen and len(deployment.require().ranks) > 1:
            os.kill(_pid(self._target), signal.SIGSTOP)


def _with_scales_of_the_next(stacks: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return experts that INT8 turns into their own values with another expert's scales.

    A scale is the largest magnitude of an output channel by 127, so a channel times the quotient of
    two such magnitudes has its own values and the other's scale.
    """

    def moved(stack_EOI: Tensor) -> Tensor:
        largest_EO1 = stack_EOI.abs().amax(-1, keepdim=True).clamp(min=1e-6)
        return stack_EOI * (largest_EO1.roll(1, 0) / largest_EO1)

    gate_up, down = stacks
    return moved(gate_up), moved(down)


def _keep(value: bool) -> bool:
    return True


_calls = 0


def _now_and_then(every: int, sleep_ms: float, value: Any) -> Any:
    global _calls
    _calls += 1
    if _calls % every == 0:
        time.sleep(sleep_ms / 1e3)
    return value


def _late(sleep_s: float, value: Any) -> Any:
    time.sleep(sleep_s)
    return value


def _rank(target: Target) -> int:
    """Draw a rank; never the first, so that one stays whatever the seed."""
    ranks = sorted(target.deployment.require().ranks)
    return int(target.rng.choice(ranks[1:]))


def _pid(target: Target) -> int:
    return target.deployment.require().ranks[_rank(target)]
