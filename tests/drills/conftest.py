"""One engine for all drills in this process; each test has a session of its own on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from workbench.drills.files import find
from workbench.drills.opening import opened
from workbench.drills.session import Session

DRILLS = ("hot-expert", "routing-jitter", "half-updated-table")


@pytest.fixture(scope="session")
def bench() -> Iterator[Session]:
    """Own the engine and its window; this session itself runs nothing."""
    with opened(find(DRILLS[0])) as session:
        yield session


@pytest.fixture
def make_session(bench):
    """Make sessions on the shared engine and end each, restored."""
    made = []

    def make(drill, **options):
        bench.window.clear()
        session = Session(find(drill), bench.engine, bench.window, **options)
        made.append(session)
        return session

    yield make
    for session in made:
        session.finish("the test is over", graded=False)
    state = bench.engine.control.state()
    assert state["faults"] == [] and bench.engine.control.policy.is_empty
