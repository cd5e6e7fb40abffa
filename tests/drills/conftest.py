"""One engine for the drills of a plain one; each test has a session of its own on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from workbench.drills.files import find, folder
from workbench.drills.opening import opened
from workbench.drills.scenario import Deployed
from workbench.drills.session import Session

DRILLS = (
    "hot-expert",
    "routing-jitter",
    "half-updated-table",
    "tokens-dropped",
    "damaged-weights",
    "out-of-memory",
)
"""The drills that `make test` walks; `make drills` walks all of them."""
ALL = tuple(sorted(path.stem for path in folder().glob("*.yaml")))


@pytest.fixture(scope="session")
def bench() -> Iterator[Session]:
    """Own the engine and its window; this session itself runs nothing."""
    with opened(find(DRILLS[0])) as session:
        yield session


def end_requests(bench: Session) -> None:
    """End what an earlier session has asked; in a drill there is no earlier one."""
    newest = bench.engine.add([1])
    for request_id in range(newest + 1):
        bench.engine.abort(request_id)
    while bench.engine.has_work:
        bench.engine.step()
    bench.window.clear()


@pytest.fixture
def make_session(bench):
    """Make sessions, on the shared engine where it will do, and end each, restored."""
    made = []
    with contextlib.ExitStack() as stack:

        def make(drill, **options):
            scenario = find(drill)
            if scenario.deployed != Deployed() or scenario.needs != {"devices": 4}:
                stack.close()  # of two engines at once one would only be in the other's way
                return stack.enter_context(opened(scenario, **options))
            end_requests(bench)
            session = Session(scenario, bench.deployment, bench.window, **options)
            made.append(session)
            return session

        yield make
        for session in made:
            session.finish("the test is over", graded=False)
    state = bench.engine.control.state()
    assert state["faults"] == [] and bench.engine.control.policy.is_empty
