"""Those who look: real browsers, readers without a browser, and plain clients of the stream."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from engine.errors import MachineError
from engine.runtime.telemetry import Message, TelemetryClient

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
MAP = ".trw-map[data-seq]"
"""A live map that has drawn a frame."""
FIRST_FRAME_S = 60.0
_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    "--no-first-run",
)
_COUNT = """map => {
    window.framesShown = 0;
    new MutationObserver(() => window.framesShown++).observe(
        map, { attributes: true, attributeFilter: ["data-seq"] });
}"""


class Browser:
    """A real Chromium whose readers come and go."""

    def __init__(self, chromium: Any) -> None:
        self._chromium = chromium
        self.first_frames_s: list[float] = []
        """Seconds from asking for a page to the first frame of its map, by visit."""

    @contextlib.contextmanager
    def readers(self, url: str, count: int) -> Iterator[list[Any]]:
        """Open `count` windows on a page; with a map, wait until each has drawn a frame."""
        contexts = [
            self._chromium.new_context(viewport={"width": 1280, "height": 800})
            for _ in range(count)
        ]
        try:
            yield [self._open(context, url) for context in contexts]
        finally:
            for context in contexts:
                context.close()

    def shown_per_s(self, pages: list[Any], seconds: float) -> list[float]:
        """Return how many frames each window draws in a second."""
        for page in pages:
            page.locator(MAP).first.evaluate(_COUNT)
        began, before = time.monotonic(), [page.evaluate("framesShown") for page in pages]
        pages[0].wait_for_timeout(1e3 * seconds)
        after = [page.evaluate("framesShown") for page in pages]
        spent = time.monotonic() - began
        return [(late - early) / spent for early, late in zip(before, after, strict=True)]

    def _open(self, context: Any, url: str) -> Any:
        page = context.new_page()
        began = time.monotonic()
        page.goto(url, wait_until="commit")
        if "/step" in url:
            page.locator(".trw-stepper").first.wait_for(timeout=1e3 * FIRST_FRAME_S)
            return page
        page.locator(MAP).first.wait_for(state="attached", timeout=1e3 * FIRST_FRAME_S)
        self.first_frames_s.append(time.monotonic() - began)
        return page


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Run an installed Chromium.

    Raises:
        MachineError: there is none, or nothing to drive it with.
    """
    if find_spec("playwright") is None:
        raise MachineError("Playwright is not installed; install the extra 'dev'.")
    path = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if path is None:
        raise MachineError(f"no browser is installed; looked for {', '.join(BROWSERS)}.")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=_FLAGS)
        try:
            yield Browser(chromium)
        finally:
            chromium.close()


class Clients:
    """Clients of the stream itself that acknowledge each frame as soon as they have read it."""

    def __init__(self, address: tuple[str, int], key: bytes, count: int) -> None:
        self.shown = [0] * count
        self.first_frames_s: list[float] = []
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._clients = [
            TelemetryClient(address, key, on_frame=self._counter(number)) for number in range(count)
        ]

    def start(self) -> None:
        """Connect all; return when each has its first frame.

        Raises:
            MachineError: that took too long.
        """
        for client in self._clients:
            client.start()
        while not all(self.shown):
            if time.monotonic() - self._began > FIRST_FRAME_S:
                raise MachineError(f"{self.shown.count(0)} clients of the stream saw no frame.")
            time.sleep(0.01)

    def control(self, action: str, **detail: Any) -> dict[str, Any]:
        """Ask the engine's process something, by the first client."""
        return self._clients[0].control(action, **detail)

    def close(self) -> None:
        """Disconnect all."""
        for client in self._clients:
            client.close()

    def _counter(self, number: int) -> Any:
        def on_frame(frame: Message) -> None:
            with self._lock:
                if not self.shown[number]:
                    self.first_frames_s.append(time.monotonic() - self._began)
                self.shown[number] += 1

        return on_frame


@contextlib.contextmanager
def clients(address: tuple[str, int], key: bytes, count: int) -> Iterator[Clients]:
    """Let `count` clients follow the stream meanwhile."""
    group = Clients(address, key, count)
    try:
        group.start()
        yield group
    finally:
        group.close()
