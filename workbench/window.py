"""The recent past of a running engine, for whoever watches it from another process.

`Window` is a sink with tight bounds. `pack` turns what it remembers into an answer for the
telemetry stream, `unpack` turns that answer back into the very same `Trace`, so that views, figures
and widgets read a live engine as they read a file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from engine.errors import TraceError
from engine.events import Event, TextEvent
from workbench.trace import Recorder, Trace, records
from workbench.trace.schema import COLUMNS
from workbench.trace.trace import Dropped

MAX_ROWS = 6144
MAX_BYTES = 24 << 20


class Window(Recorder):
    """Remembers the newest steps and requests of an engine; generated text is not kept."""

    def __init__(self, *, max_rows: int = MAX_ROWS, max_bytes: int = MAX_BYTES) -> None:
        super().__init__(max_rows=max_rows, max_bytes=max_bytes)

    def emit(self, event: Event) -> None:
        """Remember one event; a few microseconds."""
        if type(event) is not TextEvent:
            super().emit(event)

    def packed(self, detail: Mapping[str, Any]) -> dict[str, Any]:
        """Answer the control message `window`; safe while recording goes on.

        `cost_ms` is the processor time it took.

        Raises:
            TraceError: no engine has started yet.
        """
        began = time.thread_time()
        answer = pack(self.trace())
        return {**answer, "cost_ms": 1e3 * (time.thread_time() - began)}


def pack(trace: Trace) -> dict[str, Any]:
    """Return a trace as one flat answer: JSON values, and its columns as arrays."""
    words = {
        "start": records.pack(trace.start),
        "events": records.pack_events(trace),
        "dropped": records.pack(trace.dropped),
    }
    return {**json.loads(records.to_json(words)), **trace.columns}


def unpack(answer: Mapping[str, Any]) -> Trace:
    """Return the trace that `pack` was given.

    Raises:
        TraceError: the answer is not one of `pack`'s.
    """
    try:
        columns = {name: answer[name] for name in COLUMNS}
        events = answer["events"]
        return Trace(
            records.unpack_start(answer["start"]),
            columns,
            records.unpack_decisions(events["decisions"], columns),
            records.unpack_notes(events["notes"]),
            records.unpack(Dropped, answer["dropped"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        raise TraceError("the engine's recent past arrived in an unknown form.") from None
