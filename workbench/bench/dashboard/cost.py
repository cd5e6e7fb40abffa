"""What looking costs the engine's process: steps of the same size, watched and not, in rounds.

In each round every condition is measured once; rounds alternate in whether the dashboard comes
first or last. What is compared is compared within a round, with nobody connected as the base.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from workbench.bench.dashboard.stage import WatchedEngine, dashboard
from workbench.bench.dashboard.viewers import Browser, clients
from workbench.bench.dashboard.visitor import visitors

MANY = 20
SETTLE_S = 1.0
"""Between the arrival of those who look and the measurement."""
WINDOW_EVERY_S = 1.5
"""How often an open page Step asks for the recent past."""
BASE, BASE_EXTRA = "nobody", "one request more, not watched"

Measured = dict[str, list[dict[str, Any]]]
"""Condition -> what the engine said of itself, one entry a round."""


def slowdown(measured: Measured, name: str, base: str = BASE) -> list[float]:
    """Return by round how much longer a step takes than in the base, as a share of that."""
    pairs = zip(measured[base], measured[name], strict=True)
    return [with_it["ms"] / without["ms"] - 1 for without, with_it in pairs]


def other_threads(measured: Measured, name: str) -> list[float]:
    """Return by round the processor time of threads beside the engine's more than in the base.

    A share of the core. On a busy machine it says what the clock on the wall cannot.
    """
    pairs = zip(measured[BASE], measured[name], strict=True)
    return [with_it["other_threads"] - without["other_threads"] for without, with_it in pairs]


def watched_cost(measured: Measured, name: str) -> list[float]:
    """Return by round what a step with a watched row takes more than one with a plain row, ms."""
    pairs = zip(measured[BASE_EXTRA], measured[name], strict=True)
    return [with_it["watched_ms"] - without["ms"] for without, with_it in pairs]


def engine_rounds(
    engine: WatchedEngine, browser: Browser | None, rounds: int, seconds: float
) -> Measured:
    """Measure the engine with and without those who look."""
    looks: dict[str, Callable[[str], Any]] = {
        "dashboard, no reader": lambda url: contextlib.nullcontext(),
        f"{MANY} clients of the stream": lambda url: clients(engine.address, engine.key, MANY),
        f"{MANY} readers without a browser": lambda url: visitors(url, MANY),
    }
    if browser is not None:
        looks["1 browser"] = lambda url: browser.readers(url, 1)
        looks["5 browsers"] = lambda url: browser.readers(url, 5)
    measured: Measured = {name: [] for name in ("no stream", BASE, *looks)}

    def alone() -> None:
        with _off(engine):
            measured["no stream"].append(_measure(engine, seconds))
        measured[BASE].append(_measure(engine, seconds))

    def watched(number: int) -> None:
        with dashboard(engine) as url:
            names = list(looks)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                with looks[name](url):
                    measured[name].append(_measure(engine, seconds))

    for number in range(rounds):
        if number % 2:
            watched(number)
            alone()
        else:
            alone()
            watched(number)
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


@contextlib.contextmanager
def _off(engine: WatchedEngine) -> Iterator[None]:
    engine.ask("stream", on=False)
    try:
        yield
    finally:
        engine.ask("stream", on=True)


def _nobody() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _step_page(engine: WatchedEngine, browser: Browser | None, url: str) -> Any:
    """Open the page Step in a browser, or without one read it as a visitor."""
    return (
        browser.readers(f"{url}step", 1) if browser else visitors(f"{url}step", 1, with_map=False)
    )


def _measure(engine: WatchedEngine, seconds: float) -> dict[str, Any]:
    time.sleep(SETTLE_S)
    return engine.measure(seconds)


def spread(values: list[float]) -> tuple[float, float, float]:
    """Return median, lowest and highest."""
    return statistics.median(values), min(values), max(values)
