"""The page Drills: what it shows is what the drill answers; one thing is done at a time."""

from __future__ import annotations

import html
from typing import Any

import numpy as np

import workbench.drills
from dashboards import drill_room
from dashboards.course import MAX_POINTS
from dashboards.drill_room import RUNNING
from engine.errors import RequestError
from tests.dashboards.fake_drill import COUNTS, SIGNAL, START, visit
from workbench.widgets import decode_frame, encode_frame, fair_shares


def test_all_drills_are_listed_with_their_symptom_and_nothing_that_gives_it_away(source, drill):
    skeleton = html.unescape(visit(source).page.skeleton)
    for listed in workbench.drills.list():
        assert f'value="{listed["id"]}"' in skeleton
        scenario = workbench.drills.find(listed["id"])
        assert f'aria-label="Start {scenario.title}"' in skeleton
        assert scenario.solution[:40] not in skeleton and scenario.clues[0][:40] not in skeleton


def test_a_started_drill_shows_what_an_operator_would_see(source, drill):
    source.step(3)
    page = visit(source, START)
    values = page.page.values
    assert page.room.phase == RUNNING and values["left"] == "12:34 left"
    assert (values["s0v"], values["s0b"], values["s0r"]) == ("2.28", "1.42", "1.00 – 1.90")
    assert values["s0o"] == "✗ fail" and values["s0f"] == "max / mean"
    assert values["s1v"] == "–", "a signal without an answer has no number"
    assert "planned was cdcdcdcdcdcd" in values["table"] and values["policy"] == "smoothing 1.2"
    shown = decode_frame(page.map.pane.frame).cells_RC
    wanted = decode_frame(encode_frame(fair_shares(COUNTS), seq=1, time_s=0)).cells_RC
    np.testing.assert_array_equal(shown, wanted)
    assert page.page.skeleton.count('data-child="second"') == 1


def test_the_course_of_a_signal_is_drawn_from_what_the_drill_sampled(source, drill):
    page = visit(source, START, ("act", {"act": "smooth", "bonus": "1.5"}))
    for second in range(11, 40):
        drill.elapsed_s = float(second)
        page.room.refresh(now=True)
    page.tick(anyway=True)
    values = page.page.values
    assert len(page.room.course.points(SIGNAL["name"])) == 30
    assert values["l0d"].count("L") == 29 and values["l0d"].startswith("M")
    assert values["l0a"].count("M") == 1, "the act stands where it was done"
    assert "30 samples over the last 29 s, from 2.28 to 2.28" in values["l0w"]
    assert values["l1d"] == "" and "no samples yet" in values["l1w"]
    for second in range(40, 2000):
        drill.elapsed_s = float(second)
        page.room.refresh(now=True)
    assert len(page.room.course.points(SIGNAL["name"])) == MAX_POINTS


def test_acts_diagnosis_clues_and_checks_go_to_the_drill_and_come_back(source, drill):
    page = visit(
        source, START,
        ("act", {"act": "force", "experts": "0, 7", "layer": ""}),
        ("act", {"act": "smooth", "bonus": "1.5"}),
        ("diagnose", {"option": "hot-expert"}),
        ("hint", ""),
        ("check", ""),
    )  # fmt: skip
    assert drill.calls == [("force", {"experts": [0, 7]}), ("smooth", {"bonus": 1.5})]
    values = page.page.values
    assert (values["y0"], values["y1"], values["y2h"]) == (
        "10 s · did force",
        "10 s · did smooth",
        True,
    )
    assert "lives on that device alone" in values["diagnosis"] and drill.named == "hot-expert"
    assert values["k0"] == "Count rows by expert." and values["hint_word"] == "Clue 2 of 3"
    assert (values["c0o"], values["c0m"]) == ("✗ fail", "One still has more.")
    assert values["rows"] == "measured over 875 rows" and values["stale"] == ""


def test_how_an_act_went_stands_at_its_form_until_another_is_tried(source, drill, monkeypatch):
    done = drill.act

    def refuse(act: str, **arguments: Any) -> dict[str, Any]:
        raise RequestError("layer (99) must be one of 0 to 3.")

    monkeypatch.setattr(drill, "act", refuse)
    page = visit(source, START, ("act", {"act": "replicate", "layer": "99", "expert": "0"}))
    assert 'data-bind="a-replicate"' in page.page.skeleton
    values = page.page.values
    assert values["a-replicate"] == "■ Not done: layer (99) must be one of 0 to 3."
    assert "tone-bad" in values["a-replicate-c"] and values["reason"] == ""
    page = visit(source, ("act", {"act": "smooth", "bonus": "much"}))
    assert page.page.values["a-smooth"].startswith("■ Not done: bonus ('much') must be a number")
    monkeypatch.setattr(drill, "act", done)
    page = visit(source, ("act", {"act": "smooth", "bonus": "1.5"}))
    assert (page.page.values["a-smooth"], page.page.values["a-replicate"]) == ("✓ did smooth", "")


def test_what_costs_no_points_is_said_and_the_named_cause_stays_marked(source, drill):
    page = visit(source, START, ("diagnose", {"option": "hot-expert"}))
    marked = [f"n{at}" for at in range(len(page.room.briefing["options"]))]
    named = list(page.room.briefing["options"]).index("hot-expert")
    assert [page.page.values[name] for name in marked] == [at == named for at in range(len(marked))]
    assert f'data-bind-checked="n{named}"' in page.page.skeleton
    assert "naming another before costs nothing" in page.page.skeleton
    assert "costs no points" in page.page.skeleton


def test_after_an_act_and_a_check_the_signals_are_measured_again(source, drill, monkeypatch):
    observed = []
    answer = drill.observe

    def observe() -> dict[str, Any]:
        observed.append(len(drill.calls))
        value = 1.2 if drill.calls else 2.28
        return {**answer(), "signals": [{**SIGNAL, "value": value}]}

    monkeypatch.setattr(drill, "observe", observe)
    page = visit(source, START, ("act", {"act": "smooth", "bonus": "1.5"}))
    assert observed == [0, 1] and page.page.values["s0v"] == "1.20"
    visit(source, ("check", ""))
    assert observed == [0, 1, 1]


def test_values_from_before_an_act_are_greyed_and_called_old(source, drill):
    page = visit(source, START)
    assert page.page.values["stale"] == "" and 'data-bind-class="stale"' in page.page.skeleton
    page.room.ask("act", "smooth", bonus=1.5)  # not measured again yet
    page.tick(anyway=True)
    values = page.page.values
    assert values["stale"] == "stale" and "before the last act" in values["rows"]
    assert "tone-warn" in values["rows_class"]


def test_an_act_from_a_terminal_marks_what_stands_there_old_and_is_measured_again(
    source, drill, monkeypatch
):
    page = visit(source, START, ("check", ""))
    assert page.page.values["c0o"] == "✗ fail" and page.page.values["stale"] == ""
    drill.act("smooth", bonus=1.5)  # not by way of this page
    page.room.refresh(now=True)
    page.room.catch_up()
    page.tick(anyway=True)
    values = page.page.values
    assert values["stale"] == "stale" and values["y0"] == "10 s · did smooth"
    assert values["c0h"] and not values["no_checks"], "the check was of another engine"
    monkeypatch.setattr(drill_room, "STALE_S", 0.0)
    page.room.catch_up()
    page.tick(anyway=True)
    assert page.page.values["stale"] == "" and page.page.values["y0"] == "10 s · did smooth"
    monkeypatch.setattr(drill, "observe", None)
    page.room.catch_up()


def test_a_drill_joined_after_a_terminal_began_it_is_measured_with_what_was_done(
    source, drill, monkeypatch
):
    drill.act("publish")
    monkeypatch.setattr(workbench.drills, "attach", lambda *_, **__: drill)
    monkeypatch.setattr(drill_room, "STALE_S", 0.0)
    page = visit(source)
    page.room.join()
    page.room.catch_up()
    page.tick(anyway=True)
    assert page.page.values["y0"] == "10 s · did publish" and page.page.values["s0v"] == "2.28"


def test_what_is_to_be_known_of_a_signal_stands_beside_it(source, drill, monkeypatch):
    monkeypatch.setitem(SIGNAL, "message", "It may stay high.")
    page = visit(source, START)
    assert page.page.values["s0m"] == "It may stay high." and page.page.values["s1m"] == ""


def test_the_head_says_whose_status_it_is_while_a_drill_runs(source, drill):
    source.step(3)
    assert "engine of its own" not in visit(source).page.values["engine"]
    assert "engine of its own" in visit(source, START).page.values["engine"]


def test_an_engine_that_does_not_run_is_drawn_idle_and_said_so(source, drill, monkeypatch):
    facts = {"running": False, "starts": [{"said": "it did not start"}], "ranks": {}, "jobs": []}
    seen = drill.observe() | {"rows": 0, "table": None, "device_rows": []}
    seen |= {"expert_counts": [[0] * 4] * 2, "deployment": facts | {"instances": [{}]}}
    monkeypatch.setattr(drill, "observe", lambda: seen)
    page = visit(source, START)
    assert page.page.values["runs"] == "■ does not run; it did not start"
    assert page.page.values["rows"] == "no row has run since the last act"
    assert page.devices.spec.columns == ("0", "1", "2", "3")
    assert not decode_frame(page.devices.pane.frame).cells_RC.any()
    assert not decode_frame(page.map.pane.frame).cells_RC.any()
