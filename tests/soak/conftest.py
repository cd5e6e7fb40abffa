"""What long watching needs: a dashboard in this process with its insides in sight, and a census."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest
from bokeh.document import Document
from tornado.ioloop import IOLoop

from dashboards import app, session
from dashboards.pages.now import Now
from dashboards.source import LiveSource
from engine.runtime.telemetry import Telemetry
from workbench.trace.synthetic import SyntheticEngine

LIFETIME_MS = 1000
"""How long a session outlives its reader here; 15 s on a real dashboard."""


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.02)


def num_objects() -> int:
    """Count everything alive, once what is dead is gone."""
    gc.collect()
    gc.collect()  # what the finalizers of the first let go
    return len(gc.get_objects())


def resources(process: psutil.Process) -> dict[str, int]:
    """Count threads and open files, sockets among them, of a process."""
    return {"threads": process.num_threads(), "files": process.num_fds()}


@dataclass
class Dashboard:
    """A dashboard on an invented engine, served by this process."""

    telemetry: Telemetry
    url: str = ""
    sessions: Any = None
    """Takes no argument; returns Bokeh's sessions."""
    visits: weakref.WeakSet[Now] = field(default_factory=weakref.WeakSet)
    """The page's sessions that are alive."""

    def documents(self) -> int:
        return sum(issubclass(type(thing), Document) for thing in gc.get_objects())


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch, *, max_hz: float = 12.5) -> Iterator[Dashboard]:
    """Serve the real pages, following a stream at `max_hz`."""
    telemetry = Telemetry(max_hz=max_hz)
    source = LiveSource(telemetry.address, telemetry.key)
    shown = Dashboard(telemetry)
    real, begun, stop = app.get_server, threading.Event(), threading.Event()
    setup = Now.setup
    loops: list[IOLoop] = []

    def quickly(*args: Any, **kwargs: Any) -> Any:
        kwargs |= {
            "check_unused_sessions_milliseconds": LIFETIME_MS,
            "unused_session_lifetime_milliseconds": LIFETIME_MS,
        }
        return real(*args, **kwargs)

    def noted(self: Now) -> Any:
        shown.visits.add(self)
        return setup(self)

    def serve() -> None:
        loops.append(IOLoop())
        server = app.make_server(source, 5400)
        server.start()
        shown.url, shown.sessions = f"http://127.0.0.1:{server.port}/", server.get_sessions
        loops[0].add_callback(begun.set)
        loops[0].start()
        server.stop()
        loops[0].close(all_fds=True)

    def run() -> None:
        engine = SyntheticEngine()
        for event in engine.start():
            telemetry.emit(event)
        while not stop.wait(min(0.01, 0.5 / max_hz)):
            for event in engine.step(time.time()):
                telemetry.emit(event)

    # Panel notes every callback at INFO, and pytest would keep all of those lines.
    logger, level = logging.getLogger("panel"), logging.getLogger("panel").level
    logger.setLevel(logging.WARNING)
    monkeypatch.setattr(app, "get_server", quickly)
    monkeypatch.setattr(Now, "setup", noted)
    threads = [threading.Thread(target=serve, name="serve"), threading.Thread(target=run)]
    for thread in threads:
        thread.start()
    try:
        assert begun.wait(60)
        yield shown
    finally:
        stop.set()
        loops[0].add_callback(loops[0].stop)
        for thread in threads:
            thread.join(10)
        logger.setLevel(level)
        source.close()
        telemetry.close()


@pytest.fixture
def quick_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for frames ten times as often, so that 5000 looks take minutes and not an hour."""
    monkeypatch.setattr(session, "FRAME_MS", 10)
    monkeypatch.setattr(session, "TICK_MS", 20)
