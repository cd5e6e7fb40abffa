"""The page Now in a real Chromium."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(240)
def test_map_and_numbers_move_nothing_leaves_the_machine_and_the_keys_work(visit, stage):
    """The smoke test: one visit from opening the page to the end of the dashboard."""
    page = visit.page
    page.goto(stage.url)
    visit.wait_for_text("status", "Live")
    figure = page.locator(".trw-map canvas")
    figure.wait_for()

    # 1. What is shown changes, and is what the engine said.
    before, tokens = figure.screenshot(), visit.text("t0")
    page.wait_for_timeout(1500)
    assert figure.screenshot() != before, "the map stands still"
    assert visit.text("t0") != tokens, "the texts stand still"
    assert "synthetic" in visit.text("engine") and visit.text("running") == "6"
    assert 100 < float(visit.text("rows").replace("\u202f", "")) < 1000
    assert visit.text("p50") not in ("–", "0")
    assert "within 5 %" in visit.text("overhead_words")

    # 2. The keyboard: table and map, the help, pause and resume, the other theme.
    page.keyboard.press("t")
    page.locator(".trw-table td").first.wait_for()
    cells = page.locator(".trw-table td").all_inner_texts()
    assert len(cells) == 32 and all(cell.endswith(("×", "idle")) for cell in cells)
    assert "view=table" in page.url
    assert not figure.is_visible()
    page.keyboard.press("m")
    figure.wait_for()
    page.keyboard.press("?")
    page.locator("dialog[open]").wait_for()
    assert page.locator("dialog[open]").evaluate("shown => shown.scrollTop") == 0
    assert float(visit.text("cost")) >= 0
    page.keyboard.press("Escape")
    page.locator("dialog[open]").wait_for(state="detached")
    page.locator('button[value="map"]').click()  # a click leaves Space to the traffic
    page.keyboard.press("Space")
    visit.wait_for_text("status", "Traffic paused")
    page.locator(".trw-notice", has_text="every expert is idle").wait_for()
    page.keyboard.press("Space")
    visit.wait_for_text("status", "Live")
    assert stage.asked == [True, False]
    figure.press("ArrowRight")
    figure.press("ArrowDown")
    page.locator(".trw-value", has_text="Layer 1, expert 0").wait_for()
    page.locator('[data-send="domain"]').select_option("de")
    visit.wait_for_text("load_rows", "German")
    page.evaluate("window.loadedOnce = true")
    page.keyboard.press("d")
    page.wait_for_url("**theme=dark**")
    assert page.evaluate("window.loadedOnce"), "the other theme loads nothing anew"
    visit.wait_for_text("status", "Live")
    visit.wait_for_text("load_rows", "German")
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == "rgb(14, 17, 19)" and "domain=de" in page.url
    visit.assert_clean()

    # 3. The end of the engine, then of the dashboard, is said.
    stage.telemetry.close()
    visit.wait_for_text("status", "Engine gone")
    assert visit.text("tokens") == "–"
    stage.child.stop()
    page.get_by_role("alert").wait_for()


@pytest.mark.browser
def test_every_control_is_reached_by_tab_in_the_order_of_the_page(visit, stage):
    page = visit.page
    page.goto(stage.url)
    visit.wait_for_text("status", "Live")
    reached = []
    for _ in range(16):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate(
                """() => {
                  let at = document.activeElement;
                  while (at.shadowRoot?.activeElement) at = at.shadowRoot.activeElement;
                  return at.getAttribute("aria-label") ?? at.dataset.send ?? at.className
                    ?? at.tagName;
                }"""
            )
        )
    wanted = ["pause", "button", "Help", "card", "card", "card", "card", "has-tip", "Domain of"]
    found = [next((n for n, name in enumerate(reached) if word in name), -1) for word in wanted]
    assert -1 not in found and found == sorted(found), reached
    visit.assert_clean()


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 800, 1280, 1920])
def test_nothing_is_wider_than_the_window(visit, stage, width):
    page = visit.page
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(stage.url)
    visit.wait_for_text("status", "Live")
    page.wait_for_timeout(500)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    visit.assert_clean()


@pytest.mark.browser
def test_a_page_comes_back_by_itself_when_the_dashboard_does(visit):
    """Start, kill with SIGKILL, start again on the same port: the open page goes on."""

    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "workbench", "start", "--json", "--no-lab", "--port=5700"]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    first = start()
    try:
        url = json.loads(first.stdout.readline())["url"]
        visit.page.goto(url)
        visit.wait_for_text("status", "Live")
        first.kill()
        visit.page.get_by_role("alert").wait_for()
        second = start()
        try:
            assert json.loads(second.stdout.readline())["url"] == url
            visit.wait_for_text("status", "Live")
            assert visit.outside == []
            second.send_signal(signal.SIGINT)
            assert second.wait(timeout=60) == 0
        finally:
            second.kill()
            second.communicate()
    finally:
        first.kill()
        first.communicate()


@pytest.mark.browser
def test_the_page_may_not_ask_anybody_else_and_the_check_would_notice(visit, stage):
    """The negative control of every `assert_clean`: what is forbidden is refused and seen."""
    visit.page.goto(stage.url)
    visit.wait_for_text("status", "Live")
    refused = visit.page.evaluate("fetch('http://192.0.2.1/').then(() => 'no', () => 'refused')")
    assert refused == "refused"
    assert any("Content Security Policy" in text for text in visit.complaints)
    visit.page.evaluate("location.assign('http://192.0.2.1/')")
    visit.page.wait_for_timeout(300)
    assert visit.outside == ["http://192.0.2.1/"]


@pytest.mark.browser
def test_a_foreign_page_may_not_open_the_websocket(visit, stage):
    visit.page.goto("data:text/html,<h1>elsewhere</h1>")
    address = stage.url.replace("http", "ws") + "ws"
    how = visit.page.evaluate(
        """address => new Promise(done => {
             const socket = new WebSocket(address, ["bokeh", "token"]);
             socket.onopen = () => done("open");
             socket.onerror = () => done("refused");
           })""",
        address,
    )
    assert how == "refused"


@pytest.mark.browser
@pytest.mark.timeout(300)
def test_sessions_that_are_closed_leave_nothing_in_the_dashboard(browser, visit, stage):
    """Twenty-four visits: the process does not keep them."""
    dashboard = psutil.Process(stage.child.pid)
    sizes = []
    for _batch in range(3):
        for _ in range(8):
            visit.page.goto(stage.url)
            visit.wait_for_text("status", "Live")
        visit.page.goto("about:blank")
        visit.page.wait_for_timeout(8000)
        sizes.append(dashboard.memory_info().rss / 2**20)
    assert sizes[2] - sizes[1] < 8, f"MiB after 8, 16 and 24 visits: {sizes}"
