"""Makes the README's pictures of the page Now from the real engine.

    python tests/browser/screenshots.py [FOLDER]

writes now-light.png and now-dark.png, 1280 x 800, to FOLDER or data/screenshots. Run it on a quiet
machine: the numbers in the pictures are this machine's.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
VIEWS = {"light": "theme=light&domain=all", "dark": "theme=dark&domain=zh"}
WARM_S = 25
"""A minute of history would be full after 60 s; this is enough for a line to look at."""
MAX_BYTES = 300_000


def main() -> int:
    """Start the workbench, take the pictures, end it."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "data" / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "workbench", "start", "--json", "--no-lab"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        try:
            url = json.loads(running.stdout.readline())["url"]
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(
                    executable_path=shutil.which("chromium"), args=["--no-sandbox"]
                )
                for name, view in VIEWS.items():
                    take(browser, f"{url}?{view}", folder / f"now-{name}.png")
                browser.close()
        finally:
            running.send_signal(signal.SIGINT)
    return running.returncode


def take(browser: Browser, url: str, file: Path) -> None:
    """Open the page, let it run for a while, and save what it shows."""
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    page.goto(url)
    page.locator('[data-bind="status"]', has_text="Live").wait_for()
    page.wait_for_timeout(1000 * WARM_S)
    page.screenshot(path=file)
    page.close()
    size = file.stat().st_size
    assert size <= MAX_BYTES, f"{file} has {size} bytes, more than {MAX_BYTES}"
    print(f"{file}: {size:,} bytes")


if __name__ == "__main__":
    sys.exit(main())
