"""The live source: what state an engine is in, and that its frames arrive."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from dashboards.source import SOURCE_STATES, LiveSource, engine_state
from engine.errors import RequestError
from engine.runtime.telemetry import Telemetry
from workbench.theme import STATES
from workbench.trace.synthetic import SyntheticEngine


def wait_for(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, f"never came: {what}"
        time.sleep(0.01)


def test_the_live_source_follows_an_engine_from_connecting_to_gone():
    taken: list[tuple[str, dict]] = []

    def on_control(action: str, detail: dict) -> dict:
        if action != "traffic":
            raise RequestError("no.")
        taken.append((action, dict(detail)))
        return {"paused": True}

    telemetry = Telemetry(max_hz=50.0, on_control=on_control)
    source = LiveSource(telemetry.address, telemetry.key)
    try:
        assert source.snapshot().state in ("connecting", "loading")
        wait_for(lambda: source.snapshot().state == "loading", "loading")
        engine = SyntheticEngine()
        for event in engine.start():
            telemetry.emit(event)
        for event in engine.step():
            telemetry.emit(event)
        wait_for(lambda: source.snapshot().state == "live", "live")
        wait_for(lambda: source.snapshot().frame.meta["totals"]["rows"] == 6, "six rows")
        telemetry.note(paused=True)
        wait_for(lambda: source.snapshot().state == "paused", "paused")
        assert source.control("traffic", paused=True) == {"paused": True}
        assert taken == [("traffic", {"paused": True})]
        with pytest.raises(RequestError, match=r"^no\.$"):
            source.control("fly")
        assert source.snapshot().history
        telemetry.close()
        wait_for(lambda: source.snapshot().state == "gone", "gone")
        assert source.snapshot().frame is not None, "the last frame stays to be read"
    finally:
        source.close()
        telemetry.close()


def test_a_wrong_key_shows_as_refused():
    telemetry = Telemetry()
    source = LiveSource(telemetry.address, b"x" * 32)
    try:
        wait_for(lambda: source.snapshot().state == "refused", "refused")
        assert source.snapshot().reason == "the key is wrong"
    finally:
        source.close()
        telemetry.close()


def test_a_connected_engine_is_judged_by_its_frame(source):
    assert engine_state(None, 0.0)[0] == "connecting"
    frame = source.step(3)
    assert engine_state(frame, 0.0)[0] == "live"
    state, reason = engine_state(frame, 3.4)
    assert state == "stalled" and "3 s" in reason
    state, reason = engine_state(source.wait(4.0), 0.0)
    assert state == "stalled" and "no step has run for 4 s" in reason
    source.facts["paused"] = True
    assert engine_state(source.wait(0.1), 0.0)[0] == "paused"
    source.facts["ending"] = True
    assert engine_state(source.wait(0.1), 9.0)[0] == "ending", "said before all else, and it stays"


def test_an_engine_without_requests_is_idle(source):
    source.sums.add(source.engine.start(source.now_s)[:1])
    frame = source.wait(5.0)
    assert frame.meta["requests"] == []
    assert engine_state(frame, 0.0)[0] == "idle"


def test_every_state_of_a_source_has_a_look_of_its_own():
    looks = [STATES[state] for state in SOURCE_STATES]
    assert len({look.word for look in looks}) == len(SOURCE_STATES)
