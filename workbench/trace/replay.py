"""Play a trace back as the events a live sink saw, in their order.

Whoever reads events (views, the dashboard's source) cannot tell a replay from a running engine.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator

from engine.errors import ConfigError
from engine.events import ControlEvent, Event, RequestEvent, StepEvent, TextEvent
from workbench.trace.trace import Trace


def replay(
    trace: Trace, *, speed: float | None = None, sleep: Callable[[float], None] = time.sleep
) -> Iterator[Event]:
    """Yield the start event, then every recorded event in the order it was emitted.

    Args:
        trace: what to play; arrays of the events are views into it.
        speed: None plays without pauses, 1.0 in recorded time, 2.0 twice as fast.
        sleep: called with the seconds to wait before an event.

    Raises:
        ConfigError: `speed` is not above 0.
    """
    if speed is not None and not speed > 0:
        raise ConfigError(f"speed ({speed}) must be above 0, or None for no pauses.")
    return _play(trace, speed, sleep)


def _play(trace: Trace, speed: float | None, sleep: Callable[[float], None]) -> Iterator[Event]:
    yield trace.start
    steps = ((int(o), i) for i, o in enumerate(trace.columns["steps/order"]))
    notes = ((order, note) for order, note in trace.notes)
    clock: float | None = None
    for _, item in heapq.merge(steps, notes, key=lambda pair: pair[0]):
        event = trace.step_event(item) if isinstance(item, int) else item
        if speed is not None:
            now = _time(event)
            if clock is not None and now > clock:
                sleep((now - clock) / speed)
            clock = now if clock is None else max(clock, now)
        yield event


def _time(event: StepEvent | RequestEvent | TextEvent | ControlEvent) -> float:
    """Return when a live sink got the event: a step is told at its end."""
    if isinstance(event, StepEvent):
        return event.time_s + event.duration_ms / 1000
    return event.time_s
