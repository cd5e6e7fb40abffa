"""Every page in a real Chromium, over the real engine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"": "Now", "experts": "Experts", "step": "Step", "drills": "Drills"}
pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def url(tmp_path_factory) -> Iterator[str]:
    """A `workbench start` of our own, with a state folder of its own for drills."""
    command = [sys.executable, "-m", "workbench", "start", "--json", "--no-lab", "--port=5720"]
    state = str(tmp_path_factory.mktemp("state"))
    environment = {**os.environ, "XDG_STATE_HOME": state}
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, env=environment, text=True
    ) as running:
        try:
            yield json.loads(running.stdout.readline())["url"]
        finally:
            running.send_signal(signal.SIGINT)
            # Where the tests themselves run with SIGINT ignored, so does it.
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(60)
            running.kill()


def ready(visit, address: str) -> None:
    visit.page.goto(address)
    visit.wait_for_text("status", "Live")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_page_is_clean_in_both_themes_and_keys_lead_from_one_to_the_next(visit, url, theme):
    ready(visit, f"{url}?theme={theme}")
    for key, title in enumerate(PAGES.values(), 1):
        visit.page.keyboard.press(str(key))
        visit.page.locator("nav a[aria-current]", has_text=title).wait_for()
        visit.wait_for_text("status", "Live")
        visit.page.keyboard.press("?")
        visit.page.locator("dialog[open]", has_text="What this page shows").wait_for()
        visit.wait_for_text("open_pages", "1")
        visit.page.keyboard.press("Escape")
        visit.page.locator("dialog[open]").wait_for(state="detached")
    ground = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(246, 246, 243)", "dark": "rgb(14, 17, 19)"}[theme]
    visit.assert_clean()


@pytest.mark.parametrize("width", [390, 800, 1280, 1920])
@pytest.mark.parametrize("path", ["experts", "step", "drills"])
def test_no_page_is_wider_than_the_window(visit, url, path, width):
    visit.page.set_viewport_size({"width": width, "height": 900})
    ready(visit, url + path)
    visit.page.wait_for_timeout(2500)
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
    visit.assert_clean()


def test_experts_shows_the_recent_past_as_maps_and_as_tables(visit, url):
    page = visit.page
    ready(visit, url + "experts")
    visit.wait_for_text("past", "rows, read in")
    page.locator('[data-bind="jr3"]', has_text="%").wait_for()
    page.keyboard.press("o")
    page.locator(".trw-value", has_text="domain").first.wait_for()
    assert "rows=domains" in page.url
    page.keyboard.press("t")
    page.locator(".trw-table td").first.wait_for()
    tables = page.locator(".trw-table")
    flow = tables.nth(1).locator("td").all_inner_texts()
    assert len(flow) == 16, "four homes, four devices"
    by_home = [sum(float(cell.rstrip("%")) for cell in flow[at : at + 4]) for at in (0, 4, 8, 12)]
    assert all(abs(total - 100) < 4 for total in by_home), by_home
    page.locator('[data-send="measure"]').select_option("gini")
    visit.wait_for_text("formula", "sum |n_i - n_j|")
    visit.assert_clean()


def test_a_text_of_ones_own_is_stepped_by_the_keyboard(visit, url):
    page = visit.page
    ready(visit, url + "step")
    page.get_by_label("Your own text").fill("Der Server ist")
    page.keyboard.press("Enter")
    page.locator(".trw-aside", has_text="yours").first.wait_for()
    stepper = page.locator(".trw-stepper")
    status = visit.text("status")
    # Running a text leads the keys to the stepper; so do they where nothing has the focus.
    page.keyboard.press("ArrowRight")
    page.locator('.trw-stepper[data-token="1"]').wait_for()
    page.evaluate("document.activeElement.blur()")
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Space")
    page.locator('.trw-stepper[data-token="3"][data-layer="1"][data-stage="select"]').wait_for()
    assert visit.text("status") == status, "Space is not the traffic's here"
    assert "recorded in full" in stepper.locator(".trw-source").inner_text()
    page.keyboard.press("t")
    stepper.locator(".trw-figure td").first.wait_for()
    # The text goes on growing; the reader's place stays.
    page.wait_for_timeout(3000)
    assert stepper.get_attribute("data-token") == "3"
    # The address holds the view: a reload, or somebody else, comes back to it.
    wanted = ("request=", "token=3", "layer=1", "stage=select", "view=table")
    assert all(part in page.url for part in wanted), page.url
    page.reload()
    page.locator('.trw-stepper[data-token="3"][data-layer="1"][data-stage="select"]').wait_for()
    stepper.locator(".trw-figure td").first.wait_for()
    visit.wait_for_text("status", "Live")
    for key in ("Space", "Home"):  # on arrival, with nothing focused
        page.keyboard.press(key)
    page.locator('.trw-stepper[data-token="0"][data-layer="1"][data-stage="place"]').wait_for()
    visit.assert_clean()


def test_the_traffic_chooser_changes_what_is_written(visit, url):
    page = visit.page
    ready(visit, url)
    page.locator('[data-send="traffic_domain"]').select_option("num")
    running = page.locator('li[data-state="running"]:not([hidden]) .tag')
    for _ in range(120):
        page.wait_for_timeout(1000)
        if {*running.all_inner_texts()} == {"Arithmetic"}:
            break
    else:
        raise AssertionError(f"still {running.all_inner_texts()}")
    page.locator('[data-send="traffic_domain"]').select_option("all")
    visit.assert_clean()


def test_a_drill_is_walked_through_from_symptom_to_proof(visit, url):
    page = visit.page
    ready(visit, url + "drills")
    page.locator('[data-send="start"][value="hot-expert"]').click()
    page.locator('[data-bind="s0o"]', has_text="fail").wait_for(timeout=180_000)
    page.locator(".trw-map canvas").first.wait_for()
    page.keyboard.press("c")
    page.locator('[data-bind="c0o"]', has_text="fail").wait_for()
    page.locator('[data-send="hint"]').click()
    visit.wait_for_text("k0", "Count rows by expert")
    page.locator('input[value="hot-expert"]').check()
    page.get_by_role("button", name="Name it").click()
    visit.wait_for_text("diagnosis", "One expert of one layer")
    page.locator("summary", has_text="rebalance").click()
    page.locator("details[open] button").click()
    visit.wait_for_text("y0", "published table version")
    # One thing is done at a time: the act is followed by a measurement.
    page.locator('[data-bind="busy"]:empty').first.wait_for(state="attached")
    page.keyboard.press("c")
    page.locator('[data-bind="c0o"]', has_text="pass").wait_for()
    page.locator('[data-send="finish"]').click()
    page.get_by_role("heading", name="Passed: 100 of 100 points").wait_for(timeout=120_000)
    page.get_by_role("heading", name="Restored, proven by hash").wait_for()
    assert page.get_by_text("✓ equal").count() == 5
    page.get_by_role("button", name="Back to the drills").click()
    page.locator('[data-send="start"]').first.wait_for()
    visit.assert_clean()


@pytest.mark.parametrize(
    ("drill", "cause", "act", "fields", "done"),
    [
        ("tokens-dropped", "capacity", "capacity", {"factor": "0"}, "no row is dropped"),
        (
            "out-of-memory",
            "cache",
            "configure",
            {"option": "num_blocks", "value": "1024"},
            "num_blocks",
        ),
    ],
)
def test_other_drills_are_walked_through_by_their_own_repairs(
    visit, url, drill, cause, act, fields, done
):
    page = visit.page
    ready(visit, url + "drills")
    page.locator(f'[data-send="start"][value="{drill}"]').click()
    page.locator('[data-bind="s0o"]', has_text="fail").wait_for(timeout=180_000)
    visit.wait_for_text("options", "num_blocks")
    page.locator(f'input[type="radio"][value="{cause}"]').check()
    page.get_by_role("button", name="Name it").click()
    page.locator('[data-bind="diagnosis"]:not(:empty)').first.wait_for()
    page.wait_for_timeout(1000)
    page.locator('[data-bind="busy"]:empty').first.wait_for(state="attached")
    page.locator("summary", has_text=re.compile(f"^{act} ")).click()
    for name, value in fields.items():
        page.locator(f'details[open] input[name="{name}"]').fill(value)
    page.locator("details[open] button").click()
    visit.wait_for_text("y0", done)
    page.locator('[data-bind="busy"]:empty').first.wait_for(state="attached")
    page.keyboard.press("c")
    page.locator('[data-bind="c0o"]', has_text="pass").wait_for(timeout=120_000)
    page.locator('[data-bind="busy"]:empty').first.wait_for(state="attached")
    page.wait_for_timeout(1000)
    page.locator('[data-send="finish"]').click()
    page.get_by_role("heading", name="Passed: 100 of 100 points").wait_for(timeout=120_000)
    page.get_by_role("heading", name="Restored, proven by hash").wait_for()
    page.get_by_role("button", name="Back to the drills").click()
    visit.assert_clean()
