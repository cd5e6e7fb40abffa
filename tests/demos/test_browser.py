"""A presenter and five viewers in a real Chromium, on a real engine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser.conftest import Visit, browser  # noqa: F401
from tests.demos.conftest import DEMO
from workbench.demos.playlist import find

ROOT = Path(__file__).resolve().parents[2]
STEPS = [step.id for step in find(DEMO).steps]
VIEWERS = 5


@pytest.fixture
def links():
    process = subprocess.Popen(
        [sys.executable, "-m", "workbench", "demo", "present", DEMO, "--json", "--port=5980"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    yield json.loads(process.stdout.readline())
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 0


@pytest.fixture
def open_page(browser):  # noqa: F811
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    context.set_default_timeout(90_000)

    def open_one(url: str) -> Visit:
        visit = Visit(context.new_page())

        def on_request(request) -> None:
            if not request.url.startswith(("http://127.0.0.1:", "data:", "blob:")):
                visit.outside.append(request.url)

        def on_console(message) -> None:
            if message.type in ("error", "warning"):
                visit.complaints.append(message.text)

        visit.page.on("request", on_request)
        visit.page.on("console", on_console)
        visit.page.goto(url)
        return visit

    yield open_one
    context.close()


def on_step(visit: Visit, step: int) -> None:
    visit.page.locator(f'[data-step="{STEPS[step]}"]').wait_for()


@pytest.mark.browser
@pytest.mark.timeout(600)
def test_five_viewers_follow_one_explores_and_all_end_on_the_same_step(links, open_page):
    presenter = open_page(links["presenter_url"] + "&theme=light")
    presenter.wait_for_text("role", "You present")
    viewers = [open_page(links["viewer_url"] + "?theme=light") for _ in range(VIEWERS - 1)]
    for visit in viewers:
        visit.wait_for_text("role", "Following the presenter")
        assert visit.page.locator(".notes").count() == 0

    # 1. The keys of the presenter move everybody; those of a viewer only the viewer.
    presenter.page.keyboard.press("ArrowRight")
    for visit in viewers:
        on_step(visit, 1)
    # In this step the presenter leads the stepper too: token, layer and stage.
    presenter.page.locator(".trw-lane").first.wait_for()
    presenter.page.locator(".trw-body").focus()
    for key in ("ArrowRight", "ArrowUp", "Space"):
        presenter.page.keyboard.press(key)
    led = '.trw-stepper[data-token="5"][data-layer="2"][data-stage="select"]'
    for visit in [presenter, *viewers]:
        visit.page.locator(led).wait_for()
    presenter.page.locator(".headline").click()
    viewers[0].page.keyboard.press("End")
    on_step(viewers[0], len(STEPS) - 1)
    viewers[0].wait_for_text("role", "the presenter is on step 2")
    presenter.page.keyboard.press("Space")
    for visit in viewers[1:]:
        on_step(visit, 2)
    on_step(presenter, 2)
    on_step(viewers[0], len(STEPS) - 1)

    # 2. The help opens and closes and moves nothing.
    presenter.page.keyboard.press("?")
    presenter.page.locator("dialog[open]").wait_for()
    presenter.page.keyboard.press("Escape")
    presenter.page.locator("dialog[open]").wait_for(state="detached")

    # 3. A late comer lands on the current step, who explored comes back, all end together.
    presenter.page.locator('nav.steps button[value="5"]').click()
    on_step(presenter, 5)
    late = open_page(links["viewer_url"] + "?theme=dark")
    on_step(late, 5)
    viewers[0].page.keyboard.press("Escape")
    for visit in [presenter, *viewers, late]:
        on_step(visit, 5)
        # What is measured here takes many answers of the engine, and six browsers share its cores.
        visit.page.locator('[data-bind="cs1"]', has_text="✓").wait_for(timeout=240_000)
        visit.assert_clean()
