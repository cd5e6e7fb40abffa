"""Readers who come and go leave nothing: no session, document, thread, socket, no memory."""

from __future__ import annotations

import gc
import threading
import time
import tracemalloc

import psutil
import pytest

from tests.soak.conftest import num_objects, resources, serving, wait_for
from workbench.bench.dashboard import stage
from workbench.bench.dashboard.visitor import visitors


@pytest.mark.parametrize(
    "batches",
    [
        pytest.param(3),
        pytest.param(13, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)
@pytest.mark.slow
def test_sessions_opened_and_closed_leave_none(monkeypatch, batches):
    """Four a batch, the 13th ends with the 52nd; the first two batches warm up."""
    process = psutil.Process()
    threads = set(threading.enumerate())
    marks = []
    with serving(monkeypatch) as dashboard:
        for batch in range(batches):
            with visitors(dashboard.url, 4) as readers:
                assert len(dashboard.sessions()) >= 4 and len(dashboard.visits) >= 4
                assert min(reader.shown for reader in readers) > 0
            wait_for(lambda: not dashboard.sessions(), "Bokeh's sessions to end")
            if batch == 1 and batches > 3:
                tracemalloc.start()  # takes time, so not in the short form
            wait_for(lambda: not gc.collect() or not dashboard.visits, "the visits to go")
            marks.append(
                {
                    "objects": num_objects(),
                    "documents": dashboard.documents(),
                    "visits": len(dashboard.visits),
                    "bytes": tracemalloc.get_traced_memory()[0],
                    **resources(process),
                }
            )
        tracemalloc.stop()
    told = f"after each batch: {marks}"
    warm, last = marks[1], marks[-1]
    assert last["visits"] == 0, told
    assert last["documents"] <= warm["documents"], told
    assert last["threads"] <= warm["threads"] and last["files"] <= warm["files"], told
    # One session is some 20,000 objects; of all those in between not a tenth of one may stay.
    assert last["objects"] - warm["objects"] < 2000, told
    assert last["bytes"] < 2 << 20, told
    wait_for(lambda: set(threading.enumerate()) <= threads, "the threads to end")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_50_sessions_leave_a_real_dashboards_process_as_it_was():
    """The program itself, with the lifetimes it really has: RSS, threads, open files."""
    with stage.watched_engine(shape=(61, 256, 8)) as engine, stage.dashboard(engine) as url:
        process = next(
            child for child in psutil.Process().children() if "dashboards" in child.cmdline()
        )
        marks = []
        for batch in range(7):
            with visitors(url, 10 if batch else 4):
                time.sleep(2.0)
            time.sleep(22.0)  # 15 s until a session is unused, 5 s between two looks, and some
            marks.append({"mib": process.memory_info().rss / 2**20, **resources(process)})
        warm, last = marks[2], marks[-1]
        told = f"after each batch: {marks}"
        assert last["threads"] <= warm["threads"] and last["files"] <= warm["files"], told
        assert last["mib"] - warm["mib"] < 16, told
