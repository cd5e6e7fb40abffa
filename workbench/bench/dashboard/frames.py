"""How many frames of a large map those who look see in a second, and how soon the first.

The source is invented: an engine without a model that says steps of this shape. What is measured is
the way of its frames: counted, encoded, sent, drawn and acknowledged.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from workbench.bench.dashboard.cost import MANY, SETTLE_S
from workbench.bench.dashboard.stage import WatchedEngine, dashboard
from workbench.bench.dashboard.viewers import Browser, clients
from workbench.bench.dashboard.visitor import visitors

SHAPE = (61, 256, 8)
"""Layers, experts and top-k of the largest public models of this kind."""


@dataclass
class Shown:
    """Frames a second of each who looks, and seconds to the first frame of each visit."""

    per_s: dict[str, list[float]] = field(default_factory=dict)
    first_s: dict[str, list[float]] = field(default_factory=dict)
    published: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, per_s: list[float], first_s: list[float]) -> None:
        """Take one measurement."""
        self.per_s.setdefault(name, []).extend(per_s)
        self.first_s.setdefault(name, []).extend(first_s)


def frame_rounds(
    engine: WatchedEngine, browser: Browser | None, rounds: int, seconds: float
) -> Shown:
    """Count frames for one browser, for many readers, and for many clients of the stream."""
    shown = Shown()
    for _ in range(rounds):
        with dashboard(engine) as url:
            if browser is not None:
                seen = len(browser.first_frames_s)
                with browser.readers(url, 1) as pages:
                    time.sleep(SETTLE_S)
                    per_s = browser.shown_per_s(pages, seconds)
                shown.add("1 browser", per_s, browser.first_frames_s[seen:])
            with visitors(url, MANY) as readers:
                per_s = _counted(lambda: [reader.shown for reader in readers], seconds)  # noqa: B023
                first = [reader.first_frame_s or float("inf") for reader in readers]
                shown.add(f"{MANY} readers without a browser", per_s, first)
        with clients(engine.address, engine.key, MANY) as group:
            per_s = _counted(lambda: list(group.shown), seconds)  # noqa: B023
            shown.add(f"{MANY} clients of the stream", per_s, group.first_frames_s)
            shown.published.append(engine.measure(1.0))
    return shown


def _counted(count: Any, seconds: float) -> list[float]:
    """Return by how much each counter grows in a second."""
    time.sleep(SETTLE_S)
    began, before = time.monotonic(), count()
    time.sleep(seconds)
    after, spent = count(), time.monotonic() - began
    return [(late - early) / spent for early, late in zip(before, after, strict=True)]
