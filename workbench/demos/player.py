"""Plays a demo on an engine: enters steps, keeps the traffic going, measures what is expected.

Everything here happens on the thread that calls it. `workbench demo play` drives it from a loop,
`workbench demo present` from a loop that also listens to the presenter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from engine.errors import RequestError
from engine.events import Sink, Tee
from workbench import paths
from workbench.demos.actions import ACTIONS, Hands, restore
from workbench.demos.measures import MEASURES, Readings
from workbench.demos.playlist import Expect, Playlist, Step
from workbench.demos.questions import Questions
from workbench.lifecycle import signals_held
from workbench.trace.recorder import Recorder
from workbench.traffic import Traffic, corpus_prompts

if TYPE_CHECKING:
    from engine import Engine

RECENT_ROWS = 8192
MEASURE_EVERY_S = 0.5
RUNNING = 8
WAITING, HOLDS, LATE = "waiting", "holds", "late"


@dataclass(slots=True)
class Check:
    """One expectation of the step that is shown, and how it stands."""

    expect: Expect
    value: float | None = None
    state: str = WAITING
    """`waiting`, `holds`, or `late`: its time is over; it is measured all the same."""
    seconds: float = 0.0
    """After the step was entered, when it was last measured."""

    @property
    def report(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        measure = MEASURES[self.expect.measure]
        return {
            "name": self.expect.name,
            "measure": self.expect.measure,
            "value": self.value,
            "low": self.expect.low,
            "high": self.expect.high,
            "unit": measure.unit,
            "formula": measure.formula,
            "state": self.state,
            "seconds": round(self.seconds, 2),
            "within_s": self.expect.within_s,
        }


class Player:
    """A demo under way; `at` is the step that is shown."""

    def __init__(
        self,
        playlist: Playlist,
        engine: Engine,
        recent: Recorder,
        *,
        running: int = RUNNING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take an engine that records into `recent`; nothing runs yet."""
        self.playlist, self.engine = playlist, engine
        self.at = -1
        """Place of the step that is shown; -1 before the first."""
        self.visit = 0
        """Counts the steps entered, so that two visits to one step differ."""
        self.news = 0
        """Counts what has changed for those who look: steps entered, measurements, an exhibit."""
        self.checks: list[Check] = []
        self.done: list[str] = []
        """What the step's actions did, one sentence each."""
        self.exhibit: dict[str, Any] | None = None
        """What the token stepper shows of the watched text, once it has been written."""
        self._recent, self._clock = recent, clock
        prompts = corpus_prompts()
        self.traffic = Traffic(prompts, running)
        self._hands = Hands(engine.control, self.traffic, running)
        self._questions = Questions(engine, prompts, _domains_asked(playlist))
        self._watched: int | None = None
        self._entered_s = self._measured_s = 0.0
        self._table_sha256 = engine.table.sha256()

    @property
    def step(self) -> Step:
        """The step that is shown."""
        return self.playlist.steps[max(0, self.at)]

    def prepare(self, look: Callable[[], None] = lambda: None) -> None:
        """Ask the known questions on the healthy engine; `look` is called between steps."""
        for domain in self._questions.domains:
            while not self._questions.answered(domain):
                self.run()
                look()
        self._questions.remember()

    def go(self, to: int) -> None:
        """Enter a step: put the engine back as at the start, then do the step's actions.

        Raises:
            RequestError: there is no such step.
            RoutingError: an action does not fit the model; the engine is as at the start.
        """
        if not 0 <= to < len(self.playlist.steps):
            raise RequestError(f"step ({to}) must be 0 to {len(self.playlist.steps) - 1}.")
        self._leave()
        self.at, self.visit = to, self.visit + 1
        self.checks = [Check(expect) for expect in self.step.expect]
        try:
            self.done = [
                ACTIONS[action.name](self._hands, **action.arguments)
                for action in self.step.actions
            ]
        except Exception:
            restore(self._hands)
            raise
        self._recent.clear()
        if self.step.view["kind"] == "stepper":
            self._watched = self.traffic.watch(self.engine, self.step.view["text"])
        self._entered_s = self._measured_s = self._clock()
        self.news += 1

    def run(self) -> bool:
        """Run one step of the engine; measure when it is time; return whether there was work."""
        self.traffic.fill(self.engine)
        if not self.engine.has_work:
            return False
        outputs = self.engine.step()
        self.traffic.settle(outputs)
        self._questions.take(outputs)
        if any(output.finished and output.request_id == self._watched for output in outputs):
            self._keep_exhibit()
        if self.checks and self._clock() - self._measured_s >= MEASURE_EVERY_S:
            self._measure()
        return True

    def settled(self) -> bool:
        """Say whether every expectation of the step holds or is late."""
        return all(check.state != WAITING for check in self.checks)

    def rehearse(self, told: Callable[[Step, Sequence[Check]], None] | None = None) -> list[Any]:
        """Go through all steps without a presenter; return one report for each.

        Args:
            told: called after each step with the step and its checks.
        """
        reports = []
        for to, step in enumerate(self.playlist.steps):
            self.go(to)
            while not self.settled():
                self.run()
            passed = all(check.state == HOLDS for check in self.checks)
            checks = [check.report for check in self.checks]
            reports.append({"id": step.id, "title": step.title, "passed": passed, "checks": checks})
            if told is not None:
                told(step, self.checks)
        return reports

    @property
    def restored(self) -> bool:
        """Whether policy, routing table and faults are as they were at the start."""
        control = self.engine.control
        return (
            control.policy.is_empty
            and self.engine.table.sha256() == self._table_sha256
            and not control.state()["faults"]
        )

    def close(self) -> None:
        """Put the engine back as it was at the start; again does nothing."""
        self._leave()

    # ---- inside

    def _leave(self) -> None:
        self._questions.forget()
        if self._watched is not None and self.exhibit is None:
            self.engine.abort(self._watched)
        self._watched, self.exhibit, self.done = None, None, []
        restore(self._hands)

    def _keep_exhibit(self) -> None:
        """Build what the stepper shows; the recent past will not keep it."""
        from workbench.widgets.steps import stepper_state

        self.exhibit = stepper_state(
            self._recent.trace(), self._watched, tokenizer=self.engine.tokenizer
        )
        self.news += 1

    def _measure(self) -> None:
        """Measure what does not hold yet; once it holds it stays so."""
        self._measured_s = self._clock()
        self.news += 1
        spent_s = self._measured_s - self._entered_s
        readings = Readings(self._recent.trace(), self._questions.kept, self._watched)
        for check in self.checks:
            expect = check.expect
            if check.state == HOLDS:
                continue
            found = MEASURES[expect.measure].take(readings, **expect.arguments)
            check.value = check.value if found is None else found
            check.seconds = spent_s
            if found is not None and expect.low <= found <= expect.high:
                check.state = HOLDS
            elif spent_s > expect.within_s:
                check.state = LATE


@contextmanager
def opened(
    playlist: Playlist,
    *,
    model: str = paths.DEFAULT_MODEL,
    running: int = RUNNING,
    threads: int | None = None,
    sinks: Sequence[Sink] = (),
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Player]:
    """Start an engine for a demo and yield its player; at the end the engine is as at its start.

    Args:
        playlist: the demo.
        model: model folder, or the name of a bundled model.
        running: requests kept running.
        threads: threads of one product; None takes the engine's own choice.
        sinks: what else hears the engine's events.
        clock: monotonic seconds.
    """
    with signals_held():
        from engine import Engine

    recent = Recorder(max_rows=RECENT_ROWS, max_bytes=64 << 20)
    config = EngineConfig(
        model=paths.model_folder(model),
        num_devices=playlist.needs["devices"],
        num_threads=threads,
    )
    with (
        closing(Engine(config, sink=Tee((recent, *sinks)))) as engine,
        closing(Player(playlist, engine, recent, running=running, clock=clock)) as player,
    ):
        yield player


def _domains_asked(playlist: Playlist) -> list[str]:
    """Return the domains of which a step measures the quality."""
    found = [
        str(expect.arguments["domain"])
        for step in playlist.steps
        for expect in step.expect
        if expect.measure == "quality_kept"
    ]
    return sorted(set(found))
