"""Watching for long with a page slower than its period: looks are skipped, nothing piles up.

The real loop at ten times its pace: a look every 10 ms, each of which takes 15.
"""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest

from dashboards.pages.now import Now
from dashboards.session import Session
from engine.runtime.telemetry import TelemetryClient
from tests.soak.conftest import num_objects, serving, wait_for
from workbench.bench.dashboard.visitor import visitors
from workbench.trace.synthetic import SyntheticEngine

SLOW_S = 0.015
PERIOD_S = 0.010


@pytest.mark.parametrize(
    "looks",
    [
        pytest.param(200),
        pytest.param(5000, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)
def test_a_look_slower_than_its_period_is_skipped_and_objects_stay_flat(
    monkeypatch, quick_frames, looks
):
    began_at: list[float] = []
    inside = [0, 0]
    beat = Session.beat

    def slow(self: Session) -> None:
        inside[0] += 1
        inside[1] = max(inside)
        began_at.append(time.monotonic())
        time.sleep(SLOW_S)
        beat(self)
        inside[0] -= 1

    monkeypatch.setattr(Now, "beat", slow)
    with serving(monkeypatch, max_hz=100.0) as dashboard:
        with visitors(dashboard.url, 1) as (reader,):
            wait_for(lambda: len(began_at) >= looks // 3, "a third of the looks", 600)
            objects = num_objects()
            wait_for(lambda: len(began_at) >= looks, "all of the looks", 600)
            grown = num_objects() - objects
            shown, newest = reader.shown, dashboard.telemetry.latest.seq
            wait_for(lambda: reader.shown > shown, "the map to go on")
        wait_for(lambda: not dashboard.sessions(), "the session to end")
    gaps = np.array([late - early for early, late in pairwise(began_at)])
    assert inside[1] == 1, "two looks at once"
    # Were the looks that come due kept, they would follow each other ever more closely.
    assert len(began_at) / (began_at[-1] - began_at[0]) < 1 / SLOW_S < 1 / PERIOD_S
    assert gaps.min() > 0.9 * SLOW_S
    assert shown <= min(newest, looks), "no frame twice, and not more than there were looks"
    assert grown < 2000, f"{grown} objects more after {looks} looks"


@pytest.mark.parametrize(
    "frames",
    [
        pytest.param(250),
        pytest.param(5000, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)
def test_a_slow_client_of_the_stream_skips_frames_and_ends_on_the_newest(frames):
    from engine.runtime.telemetry import Telemetry

    telemetry, engine, seen = Telemetry(max_hz=100.0), SyntheticEngine(), [0, 0]

    def draw(frame):
        assert frame.seq > seen[0], "an old frame after a newer one"
        seen[0], seen[1] = frame.seq, seen[1] + 1
        time.sleep(0.04)

    client = TelemetryClient(telemetry.address, telemetry.key, on_frame=draw)
    client.start()
    try:
        for event in engine.start():
            telemetry.emit(event)

        def step_until(seq: int) -> None:
            while (telemetry.latest.seq if telemetry.latest else 0) < seq:
                for event in engine.step(time.time()):
                    telemetry.emit(event)
                time.sleep(0.005)

        step_until(frames // 3)
        objects = num_objects()
        step_until(frames)
        grown, last = num_objects() - objects, telemetry.latest
        wait_for(lambda: seen[0] >= last.seq, "the newest frame")
        assert seen[1] < 0.6 * seen[0], "a client four times too slow skips most frames"
        assert last.meta["looking"]["frames_dropped"] > frames // 4
        assert last.meta["looking"]["events_dropped"] == 0
        assert grown < 2000, f"{grown} objects more after {frames} frames"
    finally:
        client.close()
        telemetry.close()


def test_the_census_notices_what_is_kept():
    """The negative control of "objects stay flat"."""
    before = num_objects()
    kept = [{"frame": [number]} for number in range(2500)]
    assert num_objects() - before >= 2500 and kept
