"""A source whose frames a test chooses, made by the same sums as live ones; and a drill's page."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

import workbench.drills
from dashboards.drill_room import DrillRoom
from dashboards.pages.drills import Drills
from dashboards.source import Point, Snapshot
from engine.errors import MachineError
from engine.events import Event
from engine.runtime.telemetry import Aggregator, Message
from tests.dashboards.fake_drill import FakeDrill
from workbench.trace import Recorder, Trace
from workbench.trace.synthetic import SyntheticEngine


class FakeSource:
    """Plays an invented engine one step at a time."""

    def __init__(self, **shape: int) -> None:
        self.engine = SyntheticEngine(**shape)
        self.sums = Aggregator(prompt_text=lambda ids: "the prompt ")
        self.now_s = time.time()
        self.state, self.reason = "live", ""
        self.frame: Message | None = None
        self.facts: dict[str, Any] = {}
        self.controls: list[tuple[str, dict[str, Any]]] = []
        self.refusal: Exception | None = None
        self.seq = 0
        self.recorder = Recorder()
        self.looking_ms = 2.5
        self._take(self.engine.start(self.now_s))

    def step(self, count: int = 1) -> Message:
        """Run some steps of 0.01 s and make a frame of them."""
        for _ in range(count):
            self.now_s += 0.01
            self._take(self.engine.step(self.now_s))
        return self.wait(0.02)

    def wait(self, seconds: float) -> Message:
        """Let time pass without a step and make a frame."""
        self.now_s += seconds
        self.seq += 1
        frame = self.sums.frame(self.seq, self.now_s)
        looking = {"viewers": 1, "events_dropped": 0, "thread_share": 0.012}
        self.frame = replace(frame, meta={**frame.meta, "facts": self.facts, "looking": looking})
        return self.frame

    def snapshot(self) -> Snapshot:
        points = (Point(0.0, 10.0, 9.0, 0.03), Point(0.5, 20.0, 8.0, 0.03))
        return Snapshot(self.state, self.reason, self.frame, points)

    def control(self, action: str, **detail: Any) -> Mapping[str, Any]:
        if self.refusal:
            raise self.refusal
        self.controls.append((action, detail))
        return {}

    def window(self) -> Trace:
        if self.refusal:
            raise self.refusal
        return self.recorder.trace()

    def tokens(self) -> None:
        return None

    def close(self) -> None:
        pass

    def _take(self, events: Iterable[Event]) -> None:
        events = list(events)
        self.sums.add(events)
        for event in events:
            self.recorder.emit(event)


@pytest.fixture
def source() -> FakeSource:
    return FakeSource()


@pytest.fixture
def drill(monkeypatch) -> Iterator[FakeDrill]:
    fake = FakeDrill(workbench.drills.find("hot-expert").briefing)

    def absent(*_: object) -> None:
        raise MachineError("no drill is running.")

    monkeypatch.setattr(workbench.drills, "start", lambda drill, **options: fake)
    monkeypatch.setattr(workbench.drills, "attach", absent)
    monkeypatch.setattr(Drills, "room", DrillRoom())
    yield fake
