"""Jobs that run beside a drill's engine, as they do beside any in service.

A job belongs to the deployment: an operator sees whether it runs and what it last did, and may stop
it or start it again. It is made from a drill's file by `job`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError, WorkbenchError, nearest

if TYPE_CHECKING:
    from workbench.drills.deployment import Deployment
    from workbench.trace.schema import Array
    from workbench.trace.trace import Trace

Plan = Callable[["Array", int], None]
"""Publishes a table planned for a load (L, E), with room for so many copies on each device."""


class Job:
    """Something that runs beside the engine."""

    does = ""
    """What it is there for, in words."""
    watches = False
    """Whether it watches the engine's events over a stream."""
    hidden = False
    """Whether an operator does not see it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.running = False
        self.hung = False
        """Whether it does nothing although its process lives."""
        self.runs = 0
        """How often it has done what it does."""
        self.last_s: float | None = None
        """Monotonic seconds of the last time."""

    def start(self, deployment: Deployment) -> None:
        """Run from now on; a running one goes on."""
        self.running = True

    def stop(self) -> None:
        """Run no more; again does nothing."""
        self.running = self.hung = False

    def tick(self, trace: Callable[[], Trace], rows: int, plan: Plan) -> None:
        """Do what is due after a step; called between steps."""

    def did(self) -> None:
        """Note that it has done what it does."""
        self.runs, self.last_s = self.runs + 1, time.monotonic()

    def facts(self) -> dict[str, Any]:
        """Return what an operator sees of it."""
        ago = None if self.last_s is None else round(time.monotonic() - self.last_s, 1)
        return {
            "name": self.name,
            "does": self.does,
            "running": self.running,
            "runs": self.runs,
            "last_run_s": ago,
        }


class Rebalancer(Job):
    """Plans a table for the recent load, again and again."""

    does = "publishes a table planned for the recent load"

    def __init__(self, name: str, every_rows: int = 600, spare: int = 1) -> None:
        super().__init__(name)
        self.every_rows, self.spare = every_rows, spare
        self._seen = 0

    def start(self, deployment: Deployment) -> None:
        """Begin to count rows anew."""
        if not self.running:
            self._seen = 0
        super().start(deployment)

    def tick(self, trace: Callable[[], Trace], rows: int, plan: Plan) -> None:
        """Publish a table once enough rows have run since the last."""
        self._seen += rows
        if self.hung or not self.running:
            return
        if self._seen >= self.every_rows and (recent := trace()).num_rows:
            self._seen = 0
            plan(recent.expert_counts(), self.spare)
            self.did()


class Auditor(Job):
    """Walks the decision path's state under the lock that every decision takes."""

    does = "audits the routing decisions"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.lock = threading.Lock()
        self.hold_s = 0.0
        self.pause_s = 0.05
        self._thread: threading.Thread | None = None

    def start(self, deployment: Deployment) -> None:
        """Walk on a thread of its own."""
        if self.running:
            return
        super().start(deployment)
        self._thread = threading.Thread(target=self._walk, name=self.name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        super().stop()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(2.0)

    def _walk(self) -> None:
        while self.running:
            if self.hold_s:
                with self.lock:
                    time.sleep(self.hold_s)
            self.did()
            time.sleep(self.pause_s)


def kinds() -> dict[str, type[Job]]:
    """Return the kinds of job by name, as drill files call them."""
    from workbench.drills.screens import Screens

    return {"rebalancer": Rebalancer, "auditor": Auditor, "screens": Screens}


def job(raw: Mapping[str, Any]) -> Job:
    """Make a job from a drill's file.

    Raises:
        ConfigError: there is no such kind, or its options do not fit it.
    """
    options = {name: value for name, value in raw.items() if name != "kind"}
    kind, known = raw["kind"], kinds()
    if kind not in known:
        raise ConfigError(f"unknown kind of job {kind!r}{nearest(kind, known)}")
    try:
        return known[kind](**options)
    except (TypeError, WorkbenchError) as wrong:
        raise ConfigError(f"job {raw.get('name')}: {wrong}") from None
