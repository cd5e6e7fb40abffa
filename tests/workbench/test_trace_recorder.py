"""The recorder keeps the newest events within its bounds, counts the rest, and costs little."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from engine.errors import ConfigError, TraceError
from engine.events import RequestEvent, TextEvent
from workbench.trace import Dropped, Recorder, replay
from workbench.trace import synthetic as made

START = made.start_event()


def filled(steps: int, rows: int, **bounds) -> Recorder:
    recorder = Recorder(**bounds)
    recorder.emit(START)
    for step in range(steps):
        recorder.emit(made.step_event(START, step, rows))
    return recorder


def test_without_pressure_nothing_is_dropped():
    recorder = filled(50, 4)
    assert (recorder.num_steps, recorder.num_rows) == (50, 200)
    assert recorder.dropped == Dropped()


def test_the_row_bound_drops_the_oldest_steps_and_counts_them():
    recorder = filled(50, 4, max_rows=30)
    assert (recorder.num_steps, recorder.num_rows) == (7, 28)
    assert recorder.dropped == Dropped(steps=43, rows=172)
    assert recorder.trace().columns["steps/step"].tolist() == list(range(43, 50))
    assert recorder.trace().dropped == recorder.dropped


def test_the_byte_bound_drops_the_oldest_steps():
    free = filled(1, 4).num_bytes
    recorder = filled(50, 4, max_bytes=10 * free)
    assert recorder.num_steps == 10 and recorder.num_bytes <= 10 * free
    assert recorder.dropped.steps == 40


def test_a_step_larger_than_the_bound_is_dropped_itself():
    recorder = filled(3, 40, max_rows=39)
    assert recorder.num_steps == recorder.num_rows == 0
    assert recorder.dropped == Dropped(steps=3, rows=120)


def test_the_bytes_counted_are_the_bytes_taken():
    made.step_event(START, 0, 1)
    tracemalloc.start()
    try:
        for rows, decisions in ((1, 0), (32, 0), (8, 4)):
            before = tracemalloc.get_traced_memory()[0]
            recorder = Recorder()
            recorder.emit(START)
            for step in range(200):
                recorder.emit(made.step_event(START, step, rows, num_decisions=decisions))
            taken = tracemalloc.get_traced_memory()[0] - before
            assert 0.7 < taken / recorder.num_bytes < 1.1, (rows, decisions)
            del recorder
    finally:
        tracemalloc.stop()


def test_endless_text_cannot_push_the_steps_out():
    recorder = filled(10, 4, max_bytes=200_000)
    for number in range(5_000):
        recorder.emit(TextEvent(0, "en", "word " * 4, number, False, 0.0))
    assert recorder.num_steps == 10
    assert recorder.num_bytes <= 200_000
    assert recorder.dropped.steps == 0 and recorder.dropped.notes > 4_000
    assert recorder.trace().texts[-1].num_tokens == 4_999


def test_a_step_of_no_rows_is_kept_as_such():
    recorder = filled(2, 0)
    assert (recorder.num_steps, recorder.num_rows) == (2, 0)
    assert recorder.trace().expert_counts().sum() == 0


def test_the_recorder_keeps_the_event_itself_and_copies_nothing():
    event = made.step_event(START, 0, 4)
    recorder = Recorder()
    recorder.emit(START)
    recorder.emit(event)
    assert any(kept is event for _, kept, _ in recorder._steps)


def test_emit_costs_a_few_microseconds():
    events = [made.step_event(START, step, 32) for step in range(1_000)]
    recorder = Recorder(max_rows=16_000)
    recorder.emit(START)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for event in events:
            recorder.emit(event)
        best = min(best, (time.perf_counter() - began) / len(events))
    assert best < 20e-6, f"{best * 1e6:.1f} us an event"


def test_a_new_start_begins_a_new_recording():
    recorder = filled(5, 4, max_rows=8)
    recorder.emit(START)
    assert recorder.num_steps == 0 and recorder.dropped == Dropped()
    recorder.emit(made.step_event(START, 0, 2))
    assert recorder.trace().num_rows == 2


def test_clear_forgets_events_but_not_the_engine():
    recorder = filled(5, 4)
    recorder.clear()
    assert recorder.num_rows == recorder.num_bytes == 0
    assert recorder.trace().start is START


def test_nothing_recorded_is_said_so():
    with pytest.raises(TraceError, match="nothing was recorded"):
        Recorder().trace()


@pytest.mark.parametrize(
    "bounds", [{"max_rows": 0}, {"max_bytes": -1}, {"max_rows": 1.5}, {"max_bytes": "9"}]
)
def test_a_bound_below_one_is_refused(bounds):
    with pytest.raises(ConfigError, match="at least 1"):
        Recorder(**bounds)


def test_replay_gives_the_events_a_live_sink_saw(same):
    events = list(made.run(START, steps=9, rows=3))
    recorder = Recorder()
    for event in events:
        recorder.emit(event)
    played = list(replay(recorder.trace()))
    assert len(played) == len(events) and all(map(same, played, events))
    assert isinstance(played[-1], RequestEvent)


def test_paced_replay_waits_as_long_as_the_run_did():
    recorder = Recorder()
    for event in made.run(START, steps=9, rows=1):
        recorder.emit(event)
    trace = recorder.trace()
    waits: list[float] = []
    assert len(list(replay(trace, speed=2.0, sleep=waits.append))) == 21
    last = trace.columns["steps/time_s"][-1] + trace.columns["steps/duration_ms"][-1] / 1000
    assert sum(waits) == pytest.approx((last - START.time_s) / 2, rel=1e-6)
    with pytest.raises(ConfigError, match="speed"):
        replay(trace, speed=0)
