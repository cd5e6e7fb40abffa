"""A recorded trace gives the pages what the live engine gave them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from dashboards import replay as replay_module
from dashboards.__main__ import main
from dashboards.app import frame_of
from dashboards.pages.experts import Experts
from dashboards.pages.now import Now
from dashboards.pages.step import Step
from dashboards.replay import ReplaySource
from engine.errors import ConfigError, RequestError, TraceError
from engine.runtime.telemetry.wire import MAX_FRAME_BYTES, Kind, Message, Splitter, encode
from workbench.trace import save
from workbench.window import pack


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def file(source, tmp_path) -> Path:
    source.step(60)
    return save(source.window(), tmp_path / "run.moetrace")


@pytest.fixture
def played(file, monkeypatch) -> Iterator[ReplaySource]:
    monkeypatch.setattr(replay_module, "END_S", 600.0)  # it stays at its end
    with closing(ReplaySource(file, speed=50.0)) as played:
        wait_for(lambda: (played.snapshot().frame or 0) and _steps(played) == 60)
        yield played


def _steps(played: ReplaySource) -> int:
    return played.snapshot().frame.meta["totals"]["steps"]


def test_a_replayed_frame_is_the_live_frame(source, played):
    live, there = source.frame, played.snapshot().frame
    np.testing.assert_array_equal(there.arrays["total"], live.arrays["total"])
    for name in ("engine", "domains", "totals", "table_version", "step"):
        assert there.meta[name] == live.meta[name], name
    assert there.meta["stage_ms"] == pytest.approx(live.meta["stage_ms"])
    assert there.meta["label"] == "recorded" and played.snapshot().state == "replay"


def test_every_page_shows_a_recording_by_the_same_code(source, played):
    source.frame = played.snapshot().frame  # the same moment, so the same smoothing
    for kind in (Now, Experts, Step):
        recorded, live = (
            kind(one, "light", {}, frame_of({}, "light")).page.values for one in (played, source)
        )
        differ = {name for name in live if recorded[name] != live[name]}
        assert differ <= {
            "status", "status_symbol", "status_class", "reason", "pause", "pause_word", "no_pause",
            "tokens_spark", "p50_spark", "past", "label",
        }, kind  # fmt: skip
        assert recorded["status"] == "Recording"
        assert recorded["reason"] == "recorded: run.moetrace"


def test_the_tape_can_be_held_and_goes_on(file):
    with closing(ReplaySource(file, speed=0.5)) as played:
        wait_for(lambda: (played.snapshot().frame or 0) and _steps(played) > 2)
        played.control("traffic", paused=True)
        wait_for(lambda: played.snapshot().frame.meta["facts"]["paused"])
        held = _steps(played)
        time.sleep(0.4)
        assert _steps(played) - held <= 20 and played.snapshot().state == "held"
        held = _steps(played)
        time.sleep(0.3)
        assert _steps(played) == held
        played.control("traffic", paused=False)
        wait_for(lambda: _steps(played) > held)
        for action, detail in [("watch", {}), ("traffic", {"domain": "de"}), ("fly", {})]:
            with pytest.raises(RequestError, match="a recording, not an engine"):
                played.control(action, **detail)


def test_at_its_end_the_tape_begins_anew(file, monkeypatch):
    monkeypatch.setattr(replay_module, "END_S", 0.05)
    with closing(ReplaySource(file, speed=20.0)) as played:
        wait_for(lambda: (played.snapshot().frame or 0) and _steps(played) == 60)
        wait_for(lambda: 0 < _steps(played) < 50)
        assert played.window().num_steps <= 60


def test_what_cannot_be_played_is_one_sentence(source, file, tmp_path, capsys):
    empty = save(source.window().__class__.from_events(source.window().start, []), tmp_path / "e")
    with pytest.raises(TraceError, match="holds no step"):
        ReplaySource(empty)
    with pytest.raises(ConfigError, match="speed"):
        ReplaySource(file, speed=0.0)
    assert main(["--replay", str(tmp_path / "none.moetrace")]) == 1
    assert main([]) == 2 and main(["--replay", "x", "--address", "127.0.0.1:1"]) == 2
    assert main(["--address", "127.0.0.1:1"]) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 4 and "cannot read trace" in err[0] and "--key-file" in err[3]


def test_the_recent_past_passes_over_the_wire_with_all_its_arrays(source):
    source.step(5)
    packed = pack(source.recorder.trace())
    arrays = {name: value for name, value in packed.items() if isinstance(value, np.ndarray)}
    sent = Message(Kind.REPLY, meta={"id": 1}, arrays=arrays)
    (came,) = Splitter(MAX_FRAME_BYTES).feed(encode(sent))
    assert set(came.arrays) == set(arrays) and len(arrays) > 50
