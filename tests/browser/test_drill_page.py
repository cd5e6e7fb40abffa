"""The page Drills where a learner would stumble: no cause named, and a service that others use."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys

import pytest

from tests.browser.test_pages import ROOT, ready, url  # noqa: F401  the fixture

pytestmark = [pytest.mark.browser, pytest.mark.timeout(300)]

KEPT = """() => Bokeh.documents.flatMap((one) => [...one._all_models.values()])
  .flatMap((model) => Object.values(model.attributes ?? {}))
  .map((value) => { try { return JSON.stringify(value) } catch { return "" } }).join("\\n")"""
"""What the page and its server hold in common."""


def quiet(page) -> None:
    """Wait until nothing is being done and nothing waits."""
    page.wait_for_timeout(700)
    page.locator('[data-bind="busy"]:empty').first.wait_for(state="attached")


def test_a_result_begins_at_its_head_and_no_cause_is_missed_without_a_warning(visit, url):  # noqa: F811
    page = visit.page
    page.set_viewport_size({"width": 800, "height": 700})
    ready(visit, url + "drills")
    page.locator('[data-send="start"][value="hot-expert"]').click()
    page.locator('[data-bind="s0o"]', has_text="fail").wait_for(timeout=180_000)
    page.locator('input[value="torn-table"]').check()  # chosen, which does not name it
    page.keyboard.press("c")
    visit.wait_for_text("check_warning", "No cause is named yet")
    quiet(page)
    finish = page.locator('[data-send="finish"]')
    finish.click()
    visit.wait_for_text("finish_warning", "press once more")
    assert page.evaluate("scrollY") > 300 and finish.inner_text() == "Finish without a cause"
    finish.click()
    head = page.get_by_role("heading", name="Not passed: 0 of 100 points")
    head.wait_for(timeout=120_000)
    page.get_by_text("none was named").wait_for()
    page.locator(".story-line").wait_for()
    page.wait_for_timeout(500)
    assert page.evaluate("scrollY") == 0 and head.bounding_box()["y"] < 300
    page.get_by_role("button", name="Back to the drills").click()
    page.locator('[data-send="start"]').first.wait_for()
    visit.assert_clean()


@contextlib.contextmanager
def served(folder):
    """Run a service with one operator's key; yield its address and that key."""
    workbench, keys = [sys.executable, "-m", "workbench", "serve"], str(folder / "keys")
    scopes = [f"--scope={name}" for name in ("infer", "observe", "operate")]
    made = [*workbench, "--token-file", keys, "--add-key", "op", *scopes]
    key = subprocess.run(made, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    command = [*workbench, "--port=0", "--token-file", keys, "--json"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        try:
            yield json.loads(running.stdout.readline())["url"].removesuffix("/v1"), key
        finally:
            running.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.wait(30)
            running.kill()


def test_a_safe_drill_runs_on_a_service_and_the_key_stays_nowhere(visit, url, tmp_path):  # noqa: F811
    page = visit.page
    with served(tmp_path) as (address, key):
        ready(visit, url + "drills")
        page.locator('[data-send="start"]').first.wait_for()
        page.locator("summary", has_text="On a running service").click()
        page.locator('input[name="url"]').fill(address)
        page.locator('input[name="key"]').fill("another")
        begin = page.get_by_role("button", name="Start on the service")
        begin.click()
        visit.wait_for_text("reason", "wants a key with the scopes")
        page.locator("summary", has_text="On a running service").wait_for()
        if not begin.is_visible():
            page.locator("summary", has_text="On a running service").click()
        page.locator('input[name="url"]').fill(address)
        page.locator('input[name="key"]').fill(key)
        begin.click()
        page.locator('[data-bind="s0o"]', has_text="fail").wait_for(timeout=180_000)
        page.locator(".trw-map canvas").first.wait_for()
        page.wait_for_timeout(1500)
        kept = page.evaluate(KEPT)
        assert address in kept and '"target",null' in kept and key not in kept
        offered = page.locator('input[name="act"]').evaluate_all(
            "all => all.map((one) => one.value)"
        )
        assert "stop-job" in offered and not {"publish", "restart", "drain"} & {*offered}
        page.locator('input[value="lock"]').check()
        page.get_by_role("button", name="Name it").click()
        visit.wait_for_text("diagnosis", "Routing decisions wait")
        page.locator("summary", has_text="stop-job").click()
        page.locator('details[open] input[name="name"]').fill("route-auditor")
        page.locator("details[open] button").click()
        visit.wait_for_text("y0", "the job route-auditor has ended")
        quiet(page)
        page.locator('[data-send="finish"]').click()
        page.get_by_role("heading", name="Restored, proven by hash").wait_for(timeout=120_000)
        page.get_by_role("heading", name="Passed: 100 of 100 points").wait_for()
        assert page.get_by_text("✓ equal").count() == 4
        page.get_by_role("button", name="Back to the drills").click()
    visit.assert_clean()
