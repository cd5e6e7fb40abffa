"""What a drill's engine tells, and what it keeps to itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from engine.events import ControlEvent, Event, StartEvent, StepEvent, UnitEvent
from workbench.trace.recorder import Recorder

EXAM_ROWS = 20_000
MAX_STEPS = 4096


class Window(Recorder):
    """A recorder of the recent past that keeps what is only asked apart from it."""

    enabled = True

    def __init__(self, *, max_rows: int) -> None:
        super().__init__(max_rows=max_rows)
        self.exam = Recorder(max_rows=EXAM_ROWS)
        """Records while known questions are asked."""
        self.units: deque[tuple[UnitEvent, ...]] = deque(maxlen=MAX_STEPS)
        """By recorded step: the number formats of each layer, where they are routed."""
        self.rows_of_table = 0
        """Rows of traffic under the table in force, however often the rest was forgotten."""
        self._table_version = -1
        self._asking = False

    def emit(self, event: Event) -> None:
        """Remember one event where it belongs."""
        if isinstance(event, StartEvent):
            self._table_version = -1
            self.exam.emit(event)
        elif self._asking:
            self.exam.emit(event)
            return
        elif isinstance(event, StepEvent):
            self._count(event)
            if event.units:
                self.units.append(event.units)
        super().emit(event)

    def clear(self) -> None:
        """Forget the recent past."""
        super().clear()
        self.units.clear()

    def _count(self, event: StepEvent) -> None:
        if event.table_version != self._table_version:
            self._table_version, self.rows_of_table = event.table_version, 0
        self.rows_of_table += event.num_rows

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Within this, record apart: what is asked here is no traffic."""
        self.exam.clear()
        self._asking = True
        try:
            yield
        finally:
            self._asking = False


def discreet(event: Event) -> Event | None:
    """Return an event unless it would tell what a drill has broken."""
    about_a_fault = isinstance(event, ControlEvent) and event.action in ("inject", "clear")
    return None if about_a_fault else event
