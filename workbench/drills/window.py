"""What a drill's engine tells, and what it keeps to itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engine.events import ControlEvent, Event, Sink
from workbench.trace.recorder import Recorder


class Window(Recorder):
    """A recorder of the recent past that can look away."""

    enabled = True

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Within this, record nothing: what is asked here is no traffic."""
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True


class Discreet:
    """Passes on every event but those that would tell what a drill has broken."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    @property
    def enabled(self) -> bool:
        """Whether the sink behind it listens."""
        return self._sink.enabled

    def emit(self, event: Event) -> None:
        """Pass an event on unless it is about a fault."""
        if not (isinstance(event, ControlEvent) and event.action in ("inject", "clear")):
            self._sink.emit(event)
