"""One drill on a service that others use: steady, late, repaired or not, graded, put back.

The service itself holds the drill (`engine.serve.drill`): it writes down what is in force before
the fault is set, and puts all of it back when the drill ends or when nobody extends its lease any
more. Everything here is read and done over HTTP with an operator's key. A little traffic of the
drill's own runs all the while, so that there is something to measure.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np

from engine.errors import ConfigError, RoutingError, WorkbenchError
from workbench.drills.acts_service import ACTS, ServiceHands, offered
from workbench.drills.checks import judge
from workbench.drills.course import SAMPLE_EVERY_S, Course
from workbench.drills.files import safe_of
from workbench.drills.hands import called
from workbench.drills.probes_service import LEAST_STEPS, PREFIX, labelled
from workbench.drills.proof import compared
from workbench.drills.readings import ServiceReadings
from workbench.drills.scenario import Safe, Scenario
from workbench.drills.service import Service
from workbench.drills.stages import Tell, untold
from workbench.traffic import Prompt, corpus_prompts

MOST_MINUTES = 10.0
"""The service's own limit of a fault's lease."""
LEASE_S = 20.0
"""How long the service goes on with a drill whose runner is silent."""
RUNNING = 4
"""Requests of its own that a drill keeps going."""
NEW_TOKENS = 24
QUESTIONS = 24
SETTLE_STEPS, SETTLE_S = 3, 5.0
"""Steps, and seconds at most, until a change has reached what is measured."""
PATIENCE_S = 40.0
STEP_S = 0.1
LINGER_S = 2.0
"""Longest wait for requests of its own at the end."""
AGAIN_S = 0.5
"""Pause after a request that was refused."""


@contextmanager
def on_service(
    scenario: Scenario, url: str, key: str | None, **options: Any
) -> Iterator[ServiceSession]:
    """Check a service and open a drill on it; it is put back however this ends.

    Args:
        scenario: the drill.
        url: of the service.
        key: with the scopes infer, observe and operate.
        options: of `ServiceSession`.

    Raises:
        ConfigError: the drill is not marked safe, or the address is none.
        MachineError: the service does not answer, or no drill may run there.
    """
    safe = safe_of(scenario)
    with contextlib.closing(Service(url, key)) as service:
        session = ServiceSession(safe, service, service.check(safe.ranks), **options)
        try:
            yield session
        finally:
            session.finish("broken off", graded=False)
            session.close()


class ServiceSession(Course):
    """A drill under way on a service that others use."""

    def __init__(
        self, safe: Safe, service: Service, status: dict[str, Any], **options: Any
    ) -> None:
        """Take a service that was checked; nothing is asked of it yet.

        Raises:
            ConfigError: the drill would last too long.
        """
        minutes = options.get("minutes")
        if minutes is not None and minutes > MOST_MINUTES:
            raise ConfigError(
                f"minutes ({minutes:g}) must be at most {MOST_MINUTES:g} on a service that others "
                "use."
            )
        options["minutes"] = minutes or min(safe.scenario.minutes, MOST_MINUTES)
        super().__init__(safe.scenario, **options)
        self.safe, self.service = safe, service
        self.lease = ""
        """What the service knows this drill by, while it is under way there."""
        self.ranks = tuple(status["ranks"]["living"])
        self._layers = tuple(status.get("model_shape", {}).get("moe_layers", ()))
        self._prompts = corpus_prompts(seed=self.seed)
        self._traffic = _Traffic(service, self._prompts)
        self._known: tuple[str, ...] = ()
        self._before: dict[str, float] = {}
        self._counts_LE = np.array(status["totals"]["expert_counts"])
        self._jobs = {safe.job: True} if safe.job else {}
        self._proof: dict[str, Any] | None = None
        self._unsure = False
        """Whether the service may have begun the drill without our having heard of it."""
        self._lost = ""
        """Why the service is held no more, once that is so."""
        self._over = threading.Event()

    def close(self) -> None:
        """End what runs beside; twice is fine."""
        self._over.set()
        self._traffic.close()

    def briefing(self) -> dict[str, Any]:
        """Return what a learner may know, where it happens, and which acts make sense there."""
        return super().briefing() | {
            "target": self.service.url,
            "layers": list(self._layers),
            "minutes": self.minutes,
            "acts": offered(ranks=bool(self.ranks), jobs=bool(self._jobs)),
        }

    def prepare(self, tell: Tell = untold) -> None:
        """Run some traffic, measure the steady state, write down answers.

        Raises:
            MachineError: the service is not steady, or does not answer; nothing was broken.
        """
        self._traffic.start()
        self._clear()
        self._gather(lambda have: tell("traffic", have, 2 * LEAST_STEPS), 2 * LEAST_STEPS)
        tell("answers", 0, 0)
        self._known = tuple(self._ask())
        self._measure_steady(self.readings(), tell)
        self._note("steady", values=dict(self.steady))

    def break_it(self) -> None:
        """Let the service write down what is in force and set the fault; keep its lease alive.

        Raises:
            RoutingError: the service refused; nothing has changed then.
        """
        self._note("undo registered", actions=["the service puts back what it wrote down"])
        where = {}
        if self.safe.one_rank:
            others = sorted(self.ranks)[1:]
            where = {"rank": int(np.random.default_rng(self.seed).choice(others))}
        asked = {"drill": self.scenario.id, "fault": self.safe.fault, "lease_s": LEASE_S, **where}
        try:
            begun = self.service.order("begin_drill", delay_ms=float(self.safe.delay_ms), **asked)
        except RoutingError:
            raise  # it said no, so nothing has changed there
        except WorkbenchError:
            self._unsure = True
            raise
        self.lease, self.hashes = str(begun["lease"]), dict(begun["hashes"])
        self._time_counts_from_now()
        threading.Thread(target=self._keep, name="lease", daemon=True).start()
        self._note("started", lease_s=self.minutes * 60, hashes=dict(self.hashes))
        self.phase = "running"
        self._settle()

    def step(self) -> bool:
        """Wait for a moment and look at clock and lease; False when the drill has ended."""
        if self.phase != "running":
            return False
        time.sleep(STEP_S)
        if self._lost:
            self.finish(self._lost, graded=False)
        elif self.elapsed_s >= self.minutes * 60:
            self.finish("the time is up")
        elif self._clock() - self._sampled_at >= SAMPLE_EVERY_S:
            with contextlib.suppress(WorkbenchError):  # the lease tells when it is gone for good
                self._sample()
        return self.phase == "running"

    def observe(self) -> dict[str, Any]:
        """Measure every signal now, and show what the service says of itself."""
        self._gather()
        readings, state = self.readings(), self.service.state()
        counts_LE = np.array(readings.status["totals"]["expert_counts"])
        policy = ("banned", "forced", "bias", "smoothing", "capacity_factor")
        return {
            "signals": [
                judge(probe, readings, self.steady).as_dict() for probe in self.scenario.signals
            ],
            "acts": len(self.acts),
            "rows": int(self._since("rows_total", "cause", readings)),
            "expert_counts": (counts_LE - self._counts_LE).tolist(),
            "device_rows": [],
            "table": None,
            "policy": {name: state.get(name) for name in policy},
            "engine": dict(readings.status["engine"]),
            "deployment": self._deployment(readings, state),
            "requests": dict(readings.status["requests"]) | {"broken": {}},
            "changes": [],
        }

    def act(self, name: str, /, **arguments: Any) -> dict[str, Any]:
        """Change the service as an operator would.

        Raises:
            ConfigError: there is no such act on a service, or its arguments do not fit it.
            RequestError: the drill has ended, or the act took too long.
            RoutingError: the service refused.
        """
        self._require_running()
        hands = ServiceHands(self.service, self._jobs, self._end_job)
        done = called(ACTS, name, arguments, hands)
        self.acts.append({"act": name, **arguments})
        self._note("act", act=name, arguments=arguments, said=done)
        self._settle()
        return {"said": done}

    def restore(self) -> dict[str, Any]:
        """Let the service put everything back, and hold its hashes against those from before."""
        if self._proof is not None:
            return self._proof
        self._over.set()
        if self.lease:
            self._proof = put_back(self.service, self.lease)
        elif self._unsure:
            self._proof = _unproven("the service did not say whether the drill had begun.")
        else:
            self._proof = compared({}, {})
        self._note("restored", restored=self._proof["restored"])
        return self._proof

    def readings(self) -> ServiceReadings:
        """Return what an operator has before them now."""
        return ServiceReadings(
            before=self._before,
            now=self.service.metrics(),
            status=self.service.status(),
            ranks=self.ranks,
            ask=self._ask,
            known=self._known,
        )

    # ---- inside

    def _gather(
        self,
        tell: Callable[[int], None] = lambda have: None,
        steps: int = LEAST_STEPS,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Wait until so many steps have run since the last change, within patience."""
        until = time.monotonic() + patience_s
        while time.monotonic() < until:
            name = f"{PREFIX}engine_steps_total"
            have = self.service.metrics().get(name, 0.0) - self._before.get(name, 0.0)
            tell(min(steps, int(have)))
            if have >= steps:
                return
            time.sleep(STEP_S)

    def _settle(self) -> None:
        """Let the steps that were under way at a change go by, then begin anew."""
        self._clear()
        self._gather(steps=SETTLE_STEPS, patience_s=SETTLE_S)
        self._clear()

    def _clear(self) -> None:
        """Begin anew: what was counted before a change says nothing about it."""
        self._before = self.service.metrics()
        self._counts_LE = np.array(self.service.status()["totals"]["expert_counts"])

    def _ask(self) -> list[str]:
        texts = [prompt.text for prompt in self._prompts[:QUESTIONS]]
        return self.service.complete(texts, max_tokens=2, temperature=0)

    def _end_job(self, name: str) -> None:
        """End the job that is the cause, which heals the fault; again does nothing."""
        from engine.faults import SAFE

        if self._jobs[name]:
            self.service.order("clear_fault", point=SAFE[self.safe.fault].point)
        self._jobs[name] = False

    def _keep(self) -> None:
        """Extend the lease until the drill is over; note when the service lets go of it."""
        heard_s = time.monotonic()
        while not self._over.wait(LEASE_S / 4):
            try:
                self.service.order("extend_drill", lease=self.lease, lease_s=LEASE_S)
                heard_s = time.monotonic()
            except RoutingError as refused:
                self._lost = f"the service has ended the drill: {refused}"
                return
            except WorkbenchError as silent:
                if time.monotonic() - heard_s > LEASE_S:
                    self._lost = f"the service is silent: {silent}"
                    return

    def _since(self, family: str, label: str, readings: ServiceReadings) -> float:
        now = labelled(readings.now, family, label)
        before = labelled(readings.before, family, label)
        return sum(value - before.get(key, 0.0) for key, value in now.items())

    def _deployment(self, readings: ServiceReadings, state: dict[str, Any]) -> dict[str, Any]:
        living = readings.status["ranks"]["living"]
        options = {
            "service": self.service.url,
            "number format": str(readings.status["scheme"]),
            "table version": str(state["table_version"]),
        }
        jobs = [
            {"name": name, "does": "audits the routing decisions", "running": runs, "runs": 0,
             "last_run_s": None}
            for name, runs in self._jobs.items()
        ]  # fmt: skip
        return {
            "service": self.service.url,
            "table_version": state["table_version"],
            "running": True,
            "options": options,
            "starts": [],
            "ranks": {str(rank): rank in living for rank in self.ranks},
            "instances_running": [True],
            "instances_ready": [bool(readings.status["ready"])],
            "ready_by": "completion",
            "looking": {},
            "jobs": jobs,
            "instances": [options],
        }


def put_back(service: Service, lease: str) -> dict[str, Any]:
    """End a drill and return its proof; again, or after its lease was over, the same."""
    try:
        ended = service.order("end_drill", lease=lease)
    except WorkbenchError as wrong:
        return _unproven(str(wrong))
    return compared(ended["before"], ended["after"])


def _unproven(why: str) -> dict[str, Any]:
    """Return the proof of a drill whose service tells nothing."""
    rest = f"Its lease ends a drill there by itself within {LEASE_S:g} s, and puts all back."
    return {"restored": False, "hashes": {}, "why": f"{why} {rest}"}


class _Traffic:
    """Keeps a few requests of the drill's own going."""

    def __init__(self, service: Service, prompts: list[Prompt]) -> None:
        self._service, self._prompts = service, prompts
        self._number, self._over = count(), threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(RUNNING)]

    def start(self) -> None:
        """Begin to ask."""
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End; a request under way is waited for a moment."""
        self._over.set()
        until = time.monotonic() + LINGER_S
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        while not self._over.is_set():
            number = next(self._number)
            text = self._prompts[number % len(self._prompts)].text
            try:
                self._service.complete([text], max_tokens=NEW_TOKENS, temperature=0.8, seed=number)
            except WorkbenchError:
                self._over.wait(AGAIN_S)
