"""Where a page's data comes from. A source answers one question: how do things stand now?

`LiveSource` follows an engine's telemetry; a source that replays a trace answers the same
`snapshot()`, made by the same `Aggregator`, so that a page cannot tell them apart. One source
serves all sessions of the dashboard.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from engine.runtime.telemetry import Message, TelemetryClient

STALLED_S = 2.0
"""This long without a frame, or without a step while requests run, counts as stalled."""
IDLE_S = 2.5
"""This long without a step and without requests counts as idle."""
HISTORY_S = 60.0
_HISTORY_EVERY_S = 0.5


class Point(NamedTuple):
    """One point of the short history behind the sparklines; NaN where there was nothing."""

    time_s: float
    generated_per_s: float
    step_p50_ms: float
    overhead_share: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """How things stand: a state of `states.STATES`, the newest frame, the last minute."""

    state: str
    reason: str
    """One sentence about the state where it needs one, else empty."""
    frame: Message | None
    history: tuple[Point, ...]


class Source(Protocol):
    """What a page may ask, live or replayed."""

    def snapshot(self) -> Snapshot:
        """Return how things stand now; cheap, from any thread."""

    def control(self, action: str, **detail: Any) -> Mapping[str, Any]:
        """Ask the engine for something; may take seconds, raises `RequestError`."""

    def close(self) -> None:
        """Let go of what the source holds."""


class LiveSource:
    """Follows a running engine."""

    def __init__(self, address: tuple[str, int], key: bytes) -> None:
        self._lock = threading.Lock()
        self._frame: Message | None = None
        self._arrived_at = -math.inf
        self._history: deque[Point] = deque(maxlen=round(HISTORY_S / _HISTORY_EVERY_S))
        self._client = TelemetryClient(address, key, on_frame=self._on_frame)
        self._client.start()

    def snapshot(self) -> Snapshot:
        """Return the newest frame and what state the engine is in."""
        with self._lock:
            frame, history = self._frame, tuple(self._history)
            silent_s = time.monotonic() - self._arrived_at
        state, reason = self._client.state, self._client.reason
        if state == "live":
            state, reason = engine_state(frame, silent_s)
        return Snapshot(state, reason, frame, history)

    def control(self, action: str, **detail: Any) -> Mapping[str, Any]:
        """Send a control message and wait for its answer."""
        return self._client.control(action, **detail)

    def close(self) -> None:
        """Disconnect."""
        self._client.close()

    def _on_frame(self, frame: Message) -> None:
        with self._lock:
            self._frame, self._arrived_at = frame, time.monotonic()
            last_s = self._history[-1].time_s if self._history else -math.inf
            if frame.time_s - last_s >= _HISTORY_EVERY_S:
                self._history.append(_point(frame))


def engine_state(frame: Message | None, silent_s: float) -> tuple[str, str]:
    """Judge a connected engine by its newest frame and the seconds since that came."""
    if frame is None:
        return "connecting", "waiting for the first frame"
    meta = frame.meta
    if silent_s > STALLED_S:
        return "stalled", f"no word from the engine for {silent_s:.0f} s"
    if meta["engine"] is None:
        return "loading", "the engine is reading its weights"
    if meta["facts"].get("paused"):
        return "paused", "no new requests are sent; press Resume to go on"
    idle_s = math.inf if meta["idle_s"] is None else meta["idle_s"]
    if any(request["state"] == "running" for request in meta["requests"]):
        if idle_s > STALLED_S and meta["step"] is not None:
            return "stalled", f"requests wait, but no step has run for {idle_s:.0f} s"
        return "live", ""
    return ("idle", "no requests") if idle_s > IDLE_S else ("live", "")


def _point(frame: Message) -> Point:
    meta = frame.meta
    values = (meta["generated_per_s"], meta["step_p50_ms"], meta["overhead_share"])
    return Point(frame.time_s, *(math.nan if value is None else value for value in values))
