"""Both widgets on a Panel page in a real Chromium, once and quickly; more in tests/browser."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from playwright.sync_api import sync_playwright

from tests.widgets.examples import PartTokens, long_request
from tests.widgets.panel_page import SETTLED_MS, served
from workbench.widgets import load_spec, map_pane, show_steps, stepper_pane


def test_the_map_draws_a_frame_and_the_stepper_steps():
    def make():
        stepper = show_steps(long_request(), tokenizer=PartTokens(), make=stepper_pane)
        return [map_pane(load_spec(range(4))), stepper]

    # In a thread of its own: another test's browser may hold the event loop of this one.
    with served(make) as shown, ThreadPoolExecutor(1) as looker:
        looker.submit(look, shown).result()


def look(shown):
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page()
        complaints = []
        page.on("pageerror", lambda fault: complaints.append(str(fault)))
        page.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
        page.goto(shown.url)
        page.locator(".trw-notice", has_text="Waiting for the first frame").wait_for()
        page.wait_for_timeout(SETTLED_MS)

        values = np.ones((4, 8))
        values[2, 5] = 3.0
        shown.call(lambda: shown.widgets[0].draw(values))
        page.locator('.trw-map[data-seq="1"]').wait_for()
        assert "Highest: layer 2, expert 5: 3.00" in page.locator(".trw-value").inner_text()

        page.locator(".trw-body").focus()
        for key in ("ArrowRight", "ArrowDown", "Space"):
            page.keyboard.press(key)
        page.locator('.trw-stepper[data-token="3"][data-layer="1"][data-stage="select"]').wait_for()
        assert "outer in layer 1" in page.locator(".trw-stepper .trw-said").inner_text()
        browser.close()
        assert complaints == []
