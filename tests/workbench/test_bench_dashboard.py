"""The cost of looking is measured as it says: pairs of a round, aims judged, missing rows told."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from workbench.bench import dashboard as bench
from workbench.bench.dashboard import cost, frames, process, stage, viewers


def test_a_slowdown_compares_a_turn_with_the_turn_before_it():
    measured = {
        "1 browser": [{"pairs": [(10.0, 10.1), (20.0, 20.2)]}, {"pairs": [(10.0, 11.0)]}],
        cost.NOBODY: [{"pairs": [(10.0, 10.02), (10.0, 10.04), (10.0, 10.9)]}],
    }
    by_pair = cost.stream_cost(measured, "1 browser")
    assert by_pair == pytest.approx([0.01, 0.01, 0.1])
    assert cost.slowdown(measured, "1 browser") == pytest.approx([0.006, 0.006, 0.096])
    assert cost.quartiles(by_pair) == pytest.approx((0.01, 0.01, 0.055))
    assert cost.quartiles([0.2]) == (0.2, 0.2, 0.2)


class Looked:
    """Work of 2 ms a step, 1 ms more with the stream open, and 3 ms at the desk either way."""

    def __init__(self):
        self.valve = SimpleNamespace(enabled=True)
        self.steps = 0

    def step(self):
        self.steps += 1
        time.sleep(0.001)
        odd = self.steps % 5 == 0  # a prompt's rows: no step to compare
        return process.Sample(3.0 if self.valve.enabled else 2.0, 3.0, 8, int(odd), 1, False)


def test_turns_tell_what_an_open_stream_and_the_desk_cost():
    said = process._turns(Looked(), SimpleNamespace(num_viewers=2), 0.1, 0.02, 8)
    assert len(said["pairs"]) >= 2 and set(said["pairs"]) == {(2.0, 6.0)}
    assert said["viewers"] == 2 and said["tokens_per_s"] > 100 and said["other_threads"] < 0.5
    assert process._turns(Looked(), SimpleNamespace(num_viewers=0), 0.1, 0.02, 7)["pairs"] == []


def test_a_stolen_step_is_left_out_and_counted_and_a_slow_one_is_not():
    turns = [([2.0, 2.0, 9.0], [3.0, 4.0, 3.0]), ([2.0], [3.0, 5.0]), ([2.0], [])]
    pairs, left_out = process._pairs(turns)
    assert pairs == [(2.0, pytest.approx(10 / 3)), (2.0, 3.0)] and left_out == (1, 1)


def test_a_watched_step_is_compared_with_a_step_of_as_many_rows():
    measured = {
        cost.BASE_EXTRA: [{"ms": 10.0}, {"ms": 12.0}],
        "watched": [{"watched_ms": 10.5, "ms": 99.0}, {"watched_ms": 12.1, "ms": 99.0}],
    }
    assert cost.watched_cost(measured, "watched") == pytest.approx([0.5, 0.1])


@pytest.mark.parametrize(
    ("part", "name", "value", "low", "met"),
    [
        ("engine", "1 browser", 0.02, 0.0, True),
        ("engine", "1 browser", 0.021, 0.0, False),
        ("engine", "20 clients of the stream", 0.049, 0.0, True),
        ("engine", "20 clients of the stream", 0.051, 0.0, False),
        ("frames", "1 browser", 12.0, 10.0, True),
        ("frames", "1 browser", 12.0, 9.9, False),
        ("frames", "20 readers without a browser", 5.0, 1.9, False),
        ("first frame", "1 browser", 3.1, 0.1, False),
        ("engine", "no stream", 9.0, 9.0, None),
    ],
)
def test_an_aim_is_met_or_missed_and_of_frames_by_every_reader(part, name, value, low, met):
    row = bench._row(part, name, "", value, low, 99.0, 3, "")
    assert row["met"] is met and (row["aim"] is None) == (met is None)


def test_every_aim_of_the_dashboard_is_judged_somewhere():
    assert {part for part, _ in bench.AIMS} == {"engine", "frames", "first frame"}
    told = {name for _, name in bench.AIMS}
    assert told == {"1 browser", "20 clients of the stream", "20 readers without a browser"}


def test_frames_are_counted_at_readers_and_clients_and_a_missing_browser_is_told(
    workbench, monkeypatch
):
    """The whole of it, short: processes, websockets and the stream; nothing is left."""
    monkeypatch.setattr(viewers, "BROWSERS", ("no-such-browser",))
    monkeypatch.setattr(frames, "SETTLE_S", 0.1)
    monkeypatch.setattr(frames, "MANY", 3)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    threads = set(threading.enumerate())
    words = ("--parts", "frames", "--rounds", "1", "--seconds", "0.6", "--json")
    report = workbench("bench", "dashboard", *words).json
    assert report["label"] == "measured" and "--parts frames" in report["command"]
    rows = {(row["part"], row["name"]): row for row in report["rows"]}
    for who in ("3 readers without a browser", "3 clients of the stream"):
        row = rows["frames", who]
        assert 0 < row["value"] <= 20 and "invented source of 61 x 256" in row["note"]
        assert 0 < rows["first frame", who]["value"] < 60
    for part in ("frames", "first frame"):
        row = rows[part, "1 browser"]
        assert row["value"] is row["met"] is None and "no browser is installed" in row["note"]
    assert {child.pid for child in psutil.Process().children(recursive=True)} == before
    assert set(threading.enumerate()) <= threads


@pytest.mark.slow
def test_the_watched_engine_measures_itself_in_every_state():
    """Nobody, no stream, an extra request plain and watched: each changes what it should."""
    folder = Path(__file__).parents[2] / "data" / "models" / "polyglot-moe"
    with stage.watched_engine(folder) as engine:
        shut_and_open = engine.turns(1.0, 0.25)
        assert shut_and_open["pairs"] and all(min(pair) > 0 for pair in shut_and_open["pairs"])
        usual = engine.measure(1.0)
        assert usual["steps"] >= 1 and usual["ms"] > 0 and usual["tokens_per_s"] > 0
        assert usual["watched_steps"] == usual["viewers"] == 0
        engine.ask("stream", on=False)
        assert engine.measure(1.0)["frames_per_s"] < 4, "only the sign of life"
        engine.ask("stream", on=True)
        assert engine.measure(1.0)["frames_per_s"] > 4
        engine.ask("extra", kind="plain")
        assert engine.measure(1.0)["watched_steps"] == 0
        engine.ask("extra", kind="watched")
        watched = engine.measure(1.0)
        assert 0 < watched["watched_steps"] <= watched["steps"]
        with viewers.clients(engine.address, engine.key, 2) as group:
            assert engine.measure(0.5)["viewers"] == 2 and min(group.shown) >= 1
        pid = engine.pid
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--parts", "weather"), "engine, frames, watched"),
        (("--rounds", "0"), "at least one"),
        (("--seconds", "0"), "at least one"),
    ],
)
def test_bad_usage_is_one_sentence(workbench, words, hint):
    workbench("bench", "dashboard", *words).assert_refused(2, hint)
