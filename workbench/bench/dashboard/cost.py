"""What looking costs the engine's process: steps of the same size, with the stream shut and open.

Each condition is measured in short turns, shut and open, while those who look stay where they are:
what a shared machine does meanwhile changes slower and falls on both. What the open stream costs
with nobody connected is taken off.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

from workbench.bench.dashboard.stage import WatchedEngine, dashboard
from workbench.bench.dashboard.viewers import Browser, clients
from workbench.bench.dashboard.visitor import visitors

MANY = 20
SETTLE_S = 1.0
"""Between the arrival of those who look and the measurement."""
WINDOW_EVERY_S = 1.5
"""How often an open page Step asks for the recent past."""
TURN_S = 0.25
"""How long the stream stays shut, and then open; frames go out every tenth of a second."""
NOBODY, BASE_EXTRA = "nobody", "one request more, not watched"

Measured = dict[str, list[dict[str, Any]]]
"""Condition -> what the engine said of itself, one entry a round."""


def slowdown(measured: Measured, name: str) -> list[float]:
    """Return by pair of turns how much longer a step takes than with nobody connected, a share."""
    base = statistics.median(stream_cost(measured, NOBODY) or [0.0])
    return [cost - base for cost in stream_cost(measured, name)]


def stream_cost(measured: Measured, name: str) -> list[float]:
    """Return by pair of turns how much longer a step takes with the stream open, as a share."""
    pairs = [pair for one in measured[name] for pair in one["pairs"]]
    return [opened / shut - 1 for shut, opened in pairs]


def watched_cost(measured: Measured, name: str) -> list[float]:
    """Return by round what a step with a watched row takes more than one with a plain row, ms."""
    pairs = zip(measured[BASE_EXTRA], measured[name], strict=True)
    return [with_it["watched_ms"] - without["ms"] for without, with_it in pairs]


def engine_rounds(
    engine: WatchedEngine, browser: Browser | None, rounds: int, seconds: float
) -> Measured:
    """Measure the engine with and without those who look; `seconds` a round for each."""
    looks: dict[str, Callable[[str], Any]] = {
        "dashboard, no reader": lambda url: contextlib.nullcontext(),
        f"{MANY} clients of the stream": lambda url: clients(engine.address, engine.key, MANY),
        f"{MANY} readers without a browser": lambda url: visitors(url, MANY),
    }
    if browser is not None:
        looks["1 browser"] = lambda url: browser.readers(url, 1)
        looks["5 browsers"] = lambda url: browser.readers(url, 5)
    measured: Measured = {name: [] for name in (NOBODY, *looks)}
    for number in range(rounds):
        measured[NOBODY].append(_turns(engine, seconds))
        with dashboard(engine) as url:
            names = list(looks)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                with looks[name](url):
                    measured[name].append(_turns(engine, seconds))
    return measured


def watched_rounds(
    engine: WatchedEngine, browser: Browser | None, rounds: int, seconds: float
) -> Measured:
    """Measure one request more, plain, watched, and watched with a page Step that follows it."""
    measured: Measured = {
        BASE_EXTRA: [], "watched": [], "watched, page Step open": [],
    }  # fmt: skip
    with dashboard(engine) as url:
        for number in range(rounds):
            for name in list(measured)[:: -1 if number % 2 else 1]:
                engine.ask("extra", kind="plain" if name == BASE_EXTRA else "watched")
                looking = _step_page(engine, browser, url) if "page" in name else _nobody()
                with looking:
                    measured[name].append(_measure(engine, seconds))
        engine.ask("extra", kind="none")
    return measured


def _nobody() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _step_page(engine: WatchedEngine, browser: Browser | None, url: str) -> Any:
    """Open the page Step in a browser, or without one read it as a visitor."""
    return (
        browser.readers(f"{url}step", 1) if browser else visitors(f"{url}step", 1, with_map=False)
    )


def _turns(engine: WatchedEngine, seconds: float) -> dict[str, Any]:
    time.sleep(SETTLE_S)
    return engine.turns(seconds, TURN_S)


def _measure(engine: WatchedEngine, seconds: float) -> dict[str, Any]:
    time.sleep(SETTLE_S)
    return engine.measure(seconds)


def spread(values: list[float]) -> tuple[float, float, float]:
    """Return median, lowest and highest."""
    return statistics.median(values), min(values), max(values)


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Return median, lower and upper quartile: what is left of a shared machine's outliers."""
    if len(values) < 2:
        return spread(values)
    lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
    return middle, lower, upper
