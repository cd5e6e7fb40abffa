"""Makes the README's pictures of the dashboard from the real engine.

    python tests/browser/screenshots.py [FOLDER [NAME …]]

writes now-light.png, now-dark.png, step-light.png and drills-dark.png, 1280 x 800, or those that
are named, to FOLDER or data/screenshots. Run it on a quiet machine: the numbers in the pictures are
this machine's. The drill is ended and restored at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
WARM_S = 25
"""A minute of history would be full after 60 s; this is enough for a line to look at."""
MAX_BYTES = 200_000


def main() -> int:
    """Start the workbench, take the pictures, end it."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "data" / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = sys.argv[2:] or list(PICTURES)
    command = [sys.executable, "-m", "workbench", "start", "--json", "--no-lab"]
    with (
        tempfile.TemporaryDirectory() as state,
        subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "XDG_STATE_HOME": state},
        ) as running,
    ):
        try:
            url = json.loads(running.stdout.readline())["url"]
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(
                    executable_path=shutil.which("chromium"), args=["--no-sandbox"]
                )
                for name in wanted:
                    view, prepare = PICTURES[name]
                    page = browser.new_page(viewport={"width": 1280, "height": 800})
                    page.set_default_timeout(120_000)
                    page.goto(url + view)
                    page.locator('[data-bind="status"]', has_text="Live").wait_for()
                    prepare(page)
                    take(page, folder / f"{name}.png")
                browser.close()
        finally:
            running.send_signal(signal.SIGINT)
    return running.returncode


def warm(page: Page) -> None:
    """Let the page gather some history."""
    page.wait_for_timeout(1000 * WARM_S)


def step(page: Page) -> None:
    """Go to a token's selection in the last layer."""
    page.get_by_label("Your own text").fill("Der Server ist nicht erreichbar")
    page.keyboard.press("Enter")
    page.locator(".trw-aside", has_text="yours").first.wait_for()
    page.wait_for_timeout(5000)
    page.locator(".trw-body").focus()
    for key in (*["ArrowRight"] * 5, *["ArrowDown"] * 3, "Space"):
        page.keyboard.press(key)
    page.wait_for_timeout(1000)


def drill(page: Page) -> None:
    """Break an engine, let its signals be sampled, repair it."""
    page.locator('[data-send="start"][value="hot-expert"]').click()
    page.locator('[data-bind="s0o"]', has_text="fail").wait_for()
    page.wait_for_timeout(30_000)
    page.locator("summary", has_text="rebalance").click()
    page.locator("details[open] button").click()
    page.locator('[data-bind="y0"]', has_text="published").wait_for()
    page.wait_for_timeout(20_000)
    page.keyboard.press("o")
    page.wait_for_timeout(4000)
    # What was clicked lies far down; symptom and signals are on top.
    page.evaluate("window.scrollTo(0, 0)")
    page.wait_for_timeout(500)


PICTURES: dict[str, tuple[str, Callable[[Page], None]]] = {
    "now-light": ("?theme=light&domain=all", warm),
    "now-dark": ("?theme=dark&domain=zh", warm),
    "step-light": ("step?theme=light", step),
    "drills-dark": ("drills?theme=dark", drill),
}
"""Name of the file -> address, and what is done before the picture is taken."""


def take(page: Page, file: Path) -> None:
    """Save what the page shows."""
    page.screenshot(path=file)
    page.close()
    size = file.stat().st_size
    assert size <= MAX_BYTES, f"{file} has {size} bytes, more than {MAX_BYTES}"
    print(f"{file}: {size:,} bytes")


if __name__ == "__main__":
    sys.exit(main())
