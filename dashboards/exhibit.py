"""A text that the running engine writes once, recorded in full, for all who read a tour alone."""

from __future__ import annotations

import threading
import time
from weakref import WeakKeyDictionary

from dashboards.source import Source
from engine.errors import RequestError
from workbench.widgets import state_json, stepper_state

PATIENCE_S = 60.0
"""How long writing it may take."""
_LOOK_EVERY_S = 0.5

_lock = threading.Lock()
_written: WeakKeyDictionary[Source, dict[str, str]] = WeakKeyDictionary()


def written(source: Source, text: str) -> str:
    """Return what the token stepper shows of `text`; the first time, wait until it is written.

    Raises:
        RequestError: the engine took no text, or did not write it in time.
    """
    with _lock:
        known = _written.setdefault(source, {})
        if text not in known:
            known[text] = _write(source, text)
        return known[text]


def _write(source: Source, text: str) -> str:
    request = int(source.control("watch", text=text)["request_id"])
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        trace = source.window()
        if any(e.request_id == request and e.kind == "finished" for e in trace.requests):
            return state_json(stepper_state(trace, request, tokenizer=source.tokens()))
        time.sleep(_LOOK_EVERY_S)
    raise RequestError(f"the engine did not write the text within {PATIENCE_S:g} s.")
