"""One engine for all demos in this process; each test has a player of its own on it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import yaml

from workbench.demos.player import Player, opened
from workbench.demos.playlist import find, folder

DEMO = "routing-in-five-minutes"


class Clock:
    """Real time, and as much more as a test wants."""

    ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture(scope="session")
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def bench(clock: Clock) -> Iterator[Player]:
    """Own the engine, its recorder and its player, which knows the answers at the start."""
    with opened(find(DEMO), threads=1, clock=clock) as player:
        player.prepare()
        yield player


@pytest.fixture
def player(bench: Player) -> Iterator[Player]:
    """Play the shipped demo, at its start."""
    yield bench
    bench.close()
    assert bench.restored


@pytest.fixture
def raw() -> dict[str, Any]:
    """Return the shipped demo's file, to be broken."""
    return deepcopy(yaml.safe_load((folder() / f"{DEMO}.yaml").read_text(encoding="utf-8")))
