"""Where a page's data comes from. A source answers one question: how do things stand now?

`LiveSource` follows an engine's telemetry; `dashboards.replay.ReplaySource` plays a trace file
through the same `Aggregator` and answers the same questions, so that a page has one code path. One
source serves all sessions of the dashboard.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from engine.errors import WorkbenchError
from engine.runtime.telemetry import Message, TelemetryClient

if TYPE_CHECKING:
    from engine.model.tokenizer import Tokenizer
    from workbench.trace import Trace

SOURCE_STATES = (
    "connecting", "loading", "live", "idle", "paused", "replay", "held", "stalled", "ending",
    "gone", "refused",
)  # fmt: skip
"""What a source can be in; how each looks stands in `workbench.theme.STATES`."""
ENDED = ("ending", "gone", "refused")
"""Those in which nothing can be asked any more."""
STALLED_S = 2.0
"""This long without a frame, or without a step while requests run, counts as stalled."""
IDLE_S = 2.5
"""This long without a step and without requests counts as idle."""
HISTORY_S = 60.0
_HISTORY_EVERY_S = 0.5
WINDOW_AGE_S = 1.5
"""The recent past is asked for again when what is at hand is older."""


class Point(NamedTuple):
    """One point of the short history behind the sparklines; NaN where there was nothing."""

    time_s: float
    generated_per_s: float
    step_p50_ms: float
    overhead_share: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """How things stand: one of `SOURCE_STATES`, the newest frame, the last minute."""

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

    def window(self) -> Trace:
        """Return the recent past; may take seconds, raises a `WorkbenchError`."""

    def tokens(self) -> Tokenizer | None:
        """Return what makes token ids readable; None where that is not known."""

    @property
    def looking_ms(self) -> float:
        """Processor time the last window cost the engine's process; 0 for a file."""

    def close(self) -> None:
        """Let go of what the source holds."""


class LiveSource:
    """Follows a running engine."""

    def __init__(self, address: tuple[str, int], key: bytes) -> None:
        self._lock = threading.Lock()
        self._frame: Message | None = None
        self._arrived_at = -math.inf
        self._history = History()
        self._windows = threading.Lock()
        self._window: tuple[float, Trace] | None = None
        self._tokens = Tokens()
        self.looking_ms = 0.0
        self._client = TelemetryClient(address, key, on_frame=self._on_frame)
        self._client.start()

    def snapshot(self) -> Snapshot:
        """Return the newest frame and what state the engine is in."""
        with self._lock:
            frame, history = self._frame, self._history.points
            silent_s = time.monotonic() - self._arrived_at
        state, reason = self._client.state, self._client.reason
        if state == "live":
            state, reason = engine_state(frame, silent_s)
        return Snapshot(state, reason, frame, history)

    def control(self, action: str, **detail: Any) -> Mapping[str, Any]:
        """Send a control message and wait for its answer."""
        return self._client.control(action, **detail)

    def window(self) -> Trace:
        """Return the engine's recent past, asked for once for all who look."""
        from workbench.window import unpack

        with self._windows:
            if self._window is None or time.monotonic() - self._window[0] > WINDOW_AGE_S:
                answer = self.control("window")
                self._window = time.monotonic(), unpack(answer)
                self.looking_ms = float(answer["cost_ms"])
            return self._window[1]

    def tokens(self) -> Tokenizer | None:
        """Return the tokenizer of the running model."""
        frame = self.snapshot().frame
        folder = frame.meta["facts"].get("model_folder") if frame else None
        return self._tokens.of(folder)

    def close(self) -> None:
        """Disconnect."""
        self._client.close()

    def _on_frame(self, frame: Message) -> None:
        with self._lock:
            self._frame, self._arrived_at = frame, time.monotonic()
            self._history.add(frame)


class History:
    """The last minute of frames, thinned out."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque(maxlen=round(HISTORY_S / _HISTORY_EVERY_S))

    @property
    def points(self) -> tuple[Point, ...]:
        """Oldest first."""
        return tuple(self._points)

    def add(self, frame: Message) -> None:
        """Take a frame unless the last one taken is too near."""
        last_s = self._points[-1].time_s if self._points else -math.inf
        if frame.time_s - last_s >= _HISTORY_EVERY_S:
            self._points.append(_point(frame))


class Tokens:
    """The tokenizer of a model folder, read once."""

    def __init__(self) -> None:
        self._known: dict[str, Tokenizer | None] = {}

    def of(self, folder: str | None) -> Tokenizer | None:
        """Return the folder's tokenizer; None without a folder or where it cannot be read."""
        if folder is not None and folder not in self._known:
            from engine.model.tokenizer import Tokenizer

            try:
                self._known[folder] = Tokenizer(folder)
            except WorkbenchError:
                self._known[folder] = None
        return None if folder is None else self._known[folder]


def engine_state(frame: Message | None, silent_s: float) -> tuple[str, str]:
    """Judge a connected engine by its newest frame and the seconds since that came."""
    if frame is None:
        return "connecting", "waiting for the first frame"
    meta = frame.meta
    if meta["facts"].get("ending"):
        return "ending", "the engine has been told to end, and this page with it"
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
