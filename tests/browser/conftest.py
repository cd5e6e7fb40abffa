"""A Chromium that may reach nothing but this machine, and dashboards for it to look at."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from engine.errors import RequestError
from engine.runtime.telemetry import Telemetry
from workbench.lifecycle import Child, own_identity, python_command
from workbench.trace.synthetic import SyntheticEngine

ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    "--no-first-run",
)


def chromium_path() -> str | None:
    """Return an installed Chromium; None takes the one Playwright installs."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    # Not for the whole session: Playwright keeps an event loop running; other tests bring theirs.
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=chromium_path(), args=FLAGS)
        yield chromium
        chromium.close()


@dataclass
class Visit:
    """A page and everything that went wrong on it."""

    page: Page
    outside: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def assert_clean(self) -> None:
        assert self.outside == [], "a request left this machine"
        assert self.complaints == []

    def text(self, name: str) -> str:
        """Return the text bound to `name`; Playwright looks through shadow roots."""
        return self.page.locator(f'[data-bind="{name}"]').first.inner_text()

    def wait_for_text(self, name: str, wanted: str) -> None:
        self.page.locator(f'[data-bind="{name}"]', has_text=wanted).first.wait_for()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(60_000)
    visit = Visit(context.new_page())

    def on_request(request: object) -> None:
        if not request.url.startswith(("http://127.0.0.1:", "data:", "blob:")):
            visit.outside.append(request.url)

    def on_console(message: object) -> None:
        if message.type in ("error", "warning"):
            visit.complaints.append(f"{message.type}: {message.text}")

    visit.page.on("request", on_request)
    visit.page.on("console", on_console)
    visit.page.on("pageerror", lambda fault: visit.complaints.append(str(fault)))
    yield visit
    context.close()


class Stage:
    """An invented engine at work, its telemetry, and a dashboard process that follows it."""

    def __init__(self) -> None:
        self.telemetry = Telemetry(on_control=self._on_control)
        self.paused = threading.Event()
        self.stopped = threading.Event()
        self.asked: list[bool] = []
        self.telemetry.note(paused=False)
        host, port = self.telemetry.address
        self.child = Child(
            "dashboard",
            python_command(
                "dashboards",
                f"--address={host}:{port}",
                "--key-file=-",
                "--port=5600",
                f"--parent={own_identity()}",
            ),
            first_line=self.telemetry.key.hex(),
            folder=ROOT,
        )
        # A daemon: a test run that is broken off here must not wait for it.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        try:
            self.url = str(self.child.report(60)["url"])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.stopped.set()
        self._thread.join()
        self.child.stop()
        self.telemetry.close()

    def _run(self) -> None:
        engine = SyntheticEngine()
        for event in engine.start():
            self.telemetry.emit(event)
        while not self.stopped.wait(0.01):
            if not self.paused.is_set():
                for event in engine.step(time.time()):
                    self.telemetry.emit(event)

    def _on_control(self, action: str, detail: dict) -> dict:
        if action != "traffic":
            raise RequestError(f"unknown action {action!r}.")
        self.asked.append(detail["paused"])
        if detail["paused"]:
            self.paused.set()
        else:
            self.paused.clear()
        self.telemetry.note(paused=detail["paused"])
        return dict(detail)


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()
