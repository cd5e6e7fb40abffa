"""Keep the last events of an engine in bounded memory.

`emit` runs inside the step, so it only appends the event to a list: no copy, no concatenation, no
file. Columns are built when `trace()` is asked for. When a bound is reached the oldest steps go
first and are counted. One engine has one recorder; a second `StartEvent` begins anew.
"""

from __future__ import annotations

import threading
from collections import deque

from engine.config import at_least
from engine.errors import TraceError
from engine.events import Event, StartEvent, StepEvent, TextEvent
from workbench.trace.trace import Dropped, Note, Trace

MIB = 1 << 20

STEP_BYTES = 3072
"""What a step costs beside its numbers: the record, its array heads, its stage times."""
DECISION_BYTES = 1444
"""What a full decision costs beside its (E,) arrays, likewise."""
RANK_BYTES = 1536
"""What a rank's part of a step costs beside its counts by device, likewise."""
SPAN_BYTES, FLIGHT_BYTES = 9, 13
"""What a line of those tables takes, beside its counts by device."""
UNIT_BYTES = 320
"""What one layer's number formats cost, likewise."""
NOTE_BYTES = 512


class Recorder:
    """A sink that remembers the newest events within `max_rows` and `max_bytes`."""

    enabled = True

    def __init__(self, *, max_rows: int = 2_000_000, max_bytes: int = 256 * MIB) -> None:
        """Set the bounds.

        Args:
            max_rows: most token rows kept.
            max_bytes: most memory kept, in bytes, steps and notes together; notes (requests,
                texts, control) never take more than a quarter of it.

        Raises:
            ConfigError: a bound that is no whole number of at least 1.
        """
        at_least("max_rows", max_rows, 1)
        at_least("max_bytes", max_bytes, 1)
        self.max_rows = max_rows
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._start: StartEvent | None = None
        self._reset()

    def emit(self, event: Event) -> None:
        """Remember one event; a few microseconds."""
        with self._lock:
            if type(event) is StepEvent:
                size = self._step_bytes(event)
                self._steps.append((self._order, event, size))
                self.num_rows += event.num_rows
                self._bytes += size
                if self.num_rows > self.max_rows or self._bytes > self.max_bytes:
                    self._drop_steps()
            elif type(event) is StartEvent:
                self._reset()
                self._start = event
            else:
                self._add_note(event)  # type: ignore[arg-type]
            self._order += 1

    @property
    def num_steps(self) -> int:
        """Steps remembered now."""
        return len(self._steps)

    @property
    def num_bytes(self) -> int:
        """Memory held by what is remembered now, in bytes, to within a few per cent."""
        return self._bytes

    @property
    def dropped(self) -> Dropped:
        """What had to go so far."""
        return Dropped(self._dropped_steps, self._dropped_rows, self._dropped_notes)

    def trace(self) -> Trace:
        """Return what is remembered now; recording goes on meanwhile.

        Raises:
            TraceError: no engine has started with this recorder as its sink.
        """
        with self._lock:
            start, dropped = self._start, self.dropped
            steps = [(order, event) for order, event, _ in self._steps]
            notes = [(order, note) for order, note, _ in self._notes]
        if start is None:
            raise TraceError("nothing was recorded; pass the recorder to the engine as its sink.")
        return Trace.from_events(start, steps, notes, dropped)

    def clear(self) -> None:
        """Forget all events but the start; the counters go back to 0."""
        with self._lock:
            self._reset()

    def _reset(self) -> None:
        self._steps: deque[tuple[int, StepEvent, int]] = deque()
        self._notes: deque[tuple[int, Note, int]] = deque()
        self.num_rows = 0
        """Token rows remembered now."""
        self._order = self._bytes = self._note_bytes = 0
        self._dropped_steps = self._dropped_rows = self._dropped_notes = 0

    def _step_bytes(self, event: StepEvent) -> int:
        ids = event.topk_ids
        # Two ids and one weight per slot, one margin per layer, 19 bytes of row heads.
        size = STEP_BYTES + 8 * ids.size + 4 * event.margins.size + 19 * len(ids)
        size += SPAN_BYTES * len(event.spans.stages)
        size += event.formats.nbytes + UNIT_BYTES * len(event.units)
        if event.ranks:
            size += len(event.ranks) * (RANK_BYTES + 24 * len(event.ranks[0].rows))
            for rank in event.ranks:
                size += SPAN_BYTES * len(rank.spans.stages)
                size += rank.flights.rows.nbytes + FLIGHT_BYTES * len(rank.flights.layers)
        if event.decisions:
            wide = 17 * len(event.decisions[0].logits)
            size += len(event.decisions) * (DECISION_BYTES + wide)
        return size

    def _add_note(self, note: Note) -> None:
        size = NOTE_BYTES + (
            4 * len(note.delta)
            if isinstance(note, TextEvent)
            else 32 * len(getattr(note, "prompt_token_ids", ()))
        )
        self._notes.append((self._order, note, size))
        self._bytes += size
        self._note_bytes += size
        while self._notes and self._note_bytes > self.max_bytes // 4:
            _, _, old = self._notes.popleft()
            self._bytes -= old
            self._note_bytes -= old
            self._dropped_notes += 1
        if self._bytes > self.max_bytes:
            self._drop_steps()

    def _drop_steps(self) -> None:
        """Let the oldest steps go until both bounds hold."""
        while self._steps and (self.num_rows > self.max_rows or self._bytes > self.max_bytes):
            _, event, size = self._steps.popleft()
            self.num_rows -= event.num_rows
            self._bytes -= size
            self._dropped_steps += 1
            self._dropped_rows += event.num_rows
