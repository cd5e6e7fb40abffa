"""An engine under mixed traffic while viewers come and go: flat memory, no thread or socket left.

Three minutes, or as many seconds as SOAK_SECONDS says.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from pathlib import Path

import psutil
import pytest

from tests.soak.conftest import resources, wait_for
from workbench.bench.dashboard import stage
from workbench.bench.dashboard.viewers import clients
from workbench.bench.dashboard.visitor import visitors

MODEL = Path(__file__).parents[2] / "data" / "models" / "polyglot-moe"
SECONDS = float(os.environ.get("SOAK_SECONDS", "180"))


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
def test_an_engine_stays_as_it_is_while_viewers_come_and_go():
    rng = random.Random(0)
    with stage.watched_engine(MODEL) as engine, stage.dashboard(engine) as url:
        engine_process = psutil.Process(engine.pid)
        dashboard = next(
            child for child in psutil.Process().children() if "dashboards" in child.cmdline()
        )
        quiet, marks, rounds = None, [], 0
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            with clients(engine.address, engine.key, rng.randint(1, 20)) as group:
                group.control("traffic", running=rng.randint(4, 12))
                group.control("watch")
                with visitors(url + rng.choice(["", "experts", "step"]), 2, with_map=False):
                    group.control("window")
                    measured = engine.measure(3.0)
            assert measured["tokens_per_s"] > 0 and measured["frames_per_s"] > 2
            wait_for(lambda: engine.measure(0.2)["viewers"] == 1, "all clients to be forgotten")
            rounds += 1
            if rounds == 2:
                quiet = resources(engine_process)
            marks.append(
                [process.memory_info().rss / 2**20 for process in (engine_process, dashboard)]
            )
        assert rounds >= 6, "too short to say anything"
        wait_for(lambda: resources(engine_process) == quiet, "threads and sockets to end", 10)
        third = len(marks) // 3
        for at, name in enumerate(("engine", "dashboard")):
            middle = statistics.median(mark[at] for mark in marks[third : 2 * third])
            late = statistics.median(mark[at] for mark in marks[2 * third :])
            told = f"{name}: MiB {[round(mark[at]) for mark in marks]}"
            assert late - middle < 24, told
        wait_for(lambda: dashboard.num_fds() < 64, "the dashboard's sockets to end")
    for process in (engine_process, dashboard):
        assert not process.is_running()
