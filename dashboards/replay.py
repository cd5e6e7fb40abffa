"""A recorded trace in place of a running engine: the same questions, the same code behind them.

The file's events go through the same `Aggregator` that serves a live engine, at the pace they were
recorded, round and round. Pause holds the tape; what would change an engine is refused.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dashboards.source import History, Snapshot, Tokens
from engine.errors import ConfigError, RequestError, TraceError, WorkbenchError
from engine.events import Event, StepEvent
from engine.runtime.telemetry import Aggregator, Message
from workbench import paths
from workbench.trace import Trace, load, replay
from workbench.window import Window

if TYPE_CHECKING:
    from engine.model.tokenizer import Tokenizer

FRAME_EVERY_S = 0.1
END_S = 2.0
"""How long the last frame stays before the tape begins anew."""
_LOOK_EVERY_S = 0.05


class ReplaySource:
    """Plays one trace."""

    looking_ms = 0.0

    def __init__(self, path: str | Path, *, speed: float = 1.0) -> None:
        """Read the file and begin to play.

        Args:
            path: a `.moetrace` file.
            speed: 1 plays in recorded time, 2 twice as fast.

        Raises:
            ConfigError: the speed is not above 0.
            TraceError: the file cannot be used, or holds no step.
        """
        if not speed > 0:
            raise ConfigError(f"speed ({speed:g}) must be above 0.")
        self.trace = load(path)
        if not self.trace.num_steps:
            raise TraceError(f"{path} holds no step to play.")
        self._name, self._speed = Path(path).name, speed
        self._tokens = Tokens()
        self._folder = _model_folder(self.trace.start.model)
        self._lock = threading.Lock()
        self._frame: Message | None = None
        self._history = History()
        self._window = Window()
        self._paused = self._closing = False
        self._seq = 0
        self._thread = threading.Thread(target=self._run, name="replay", daemon=True)
        self._thread.start()

    def snapshot(self) -> Snapshot:
        """Return how things stood at this point of the tape."""
        with self._lock:
            state = "connecting" if self._frame is None else "held" if self._paused else "replay"
            return Snapshot(state, f"recorded: {self._name}", self._frame, self._history.points)

    def control(self, action: str, **detail: Any) -> Mapping[str, Any]:
        """Hold the tape or let it run; refuse all else.

        Raises:
            RequestError: a recorded engine cannot do that.
        """
        if action != "traffic" or not isinstance(detail.get("paused"), bool) or len(detail) > 1:
            raise RequestError(f"{action} is not possible: this is a recording, not an engine.")
        self._paused = detail["paused"]
        return {"paused": self._paused}

    def window(self) -> Trace:
        """Return the recent past at this point of the tape."""
        return self._window.trace()

    def tokens(self) -> Tokenizer | None:
        """Return the tokenizer of the recorded model, where that model is bundled."""
        return self._tokens.of(self._folder)

    def close(self) -> None:
        """Stop playing."""
        self._closing = True
        self._thread.join(timeout=5.0)

    # ---- the tape's thread

    def _run(self) -> None:
        while not self._closing:
            self._play()
            self._wait(END_S)

    def _play(self) -> None:
        """Play the tape once. `self._now_s` is the recorded time that has been reached."""
        tokens = self.tokens()
        sums = Aggregator(tokens.decode if tokens else None)
        self._now_s = first_s = _first_s(self.trace)
        due_s = first_s
        for event in replay(self.trace):
            at_s = max(self._now_s, _time_s(event))
            while due_s < at_s and not self._closing:
                self._wait(max(0.0, due_s - self._now_s) / self._speed)
                self._now_s = max(self._now_s, due_s)
                self._publish(sums, due_s)
                due_s += FRAME_EVERY_S
            if self._closing:
                return
            sums.add([event])
            self._window.emit(event)
        self._publish(sums, max(due_s, self._now_s))

    def _publish(self, sums: Aggregator, now_s: float) -> None:
        self._seq += 1
        frame = sums.frame(self._seq, now_s)
        facts = {"paused": self._paused, "pause_word": "Hold", "resume_word": "Go on"}
        meta = {**frame.meta, "label": "recorded", "facts": facts}
        with self._lock:
            self._frame = replace(frame, meta=meta)
            if self._history.points and now_s < self._history.points[-1].time_s:
                self._history = History()  # the tape has begun anew
            self._history.add(frame)

    def _wait(self, seconds: float) -> None:
        """Let so much time pass, not counting the time the tape is held."""
        while seconds > 0 and not self._closing:
            began = time.monotonic()
            time.sleep(min(seconds, _LOOK_EVERY_S))
            if self._paused:
                self._show_held()
            else:
                seconds -= time.monotonic() - began

    def _show_held(self) -> None:
        """Let the newest frame say that the tape is held."""
        with self._lock:
            if self._frame is not None and not self._frame.meta["facts"]["paused"]:
                facts = {**self._frame.meta["facts"], "paused": True}
                self._frame = replace(self._frame, meta={**self._frame.meta, "facts": facts})


def _time_s(event: Event) -> float:
    """Return when a live sink got the event; a step is told at its end."""
    if isinstance(event, StepEvent):
        return event.time_s + event.duration_ms / 1000
    return event.time_s


def _first_s(trace: Trace) -> float:
    """Return when the tape begins: with its first step, not with the engine's start."""
    return float(trace.columns["steps/time_s"][0])


def _model_folder(name: str) -> str | None:
    with suppress(WorkbenchError):
        return str(paths.model_folder(name))
    return None
