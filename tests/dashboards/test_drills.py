"""The page Drills: what it shows is what the drill answers; one thing is done at a time."""

from __future__ import annotations

import asyncio
import html
import re
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import workbench.drills
from dashboards import acts, drill_room, drill_words
from dashboards.app import frame_of
from dashboards.course import MAX_POINTS
from dashboards.drill_room import ENDED, NONE, RUNNING, DrillRoom
from dashboards.pages.drills import Drills
from engine.errors import ConfigError, MachineError, RequestError
from workbench.drills.acts import ACTS
from workbench.widgets import decode_frame, encode_frame, fair_shares

COUNTS = [[60, 20, 20, 20], [30, 30, 30, 30]]
SIGNAL = {
    "name": "load of the busiest device", "outcome": "fail", "value": 2.28, "steady": 1.42,
    "low": 1.0, "high": 1.9, "unit": "ratio", "formula": "max / mean", "message": "",
}  # fmt: skip
CHECK = {**SIGNAL, "name": "The devices share the work", "message": "One still has more."}


class FakeDrill:
    """Answers like a drill, from memory."""

    def __init__(self, briefing: dict[str, Any]) -> None:
        self._briefing = briefing
        self.calls: list[tuple[Any, ...]] = []
        self.phase, self.running, self.named = "running", True, None
        self.elapsed_s = 10.0
        self.remarks: list[dict[str, Any]] = []

    def briefing(self) -> dict[str, Any]:
        return self._briefing

    def state(self) -> dict[str, Any]:
        if not self.running:
            raise RequestError("gone.")
        return {
            "phase": self.phase, "left_s": 754.0, "diagnosis": self.named,
            "elapsed_s": self.elapsed_s, "sampled_s": self.elapsed_s,
            "signals": {"busiest_device rows=800": 2.28}, "remarks": self.remarks,
            "diary": [{"at_s": self.elapsed_s, "said": f"did {act}"} for act, _ in self.calls],
        }  # fmt: skip

    def observe(self) -> dict[str, Any]:
        table = {"version": 3, "sha256": "ab" * 32, "planned": {"sha256": "cd" * 32}}
        policy = {"banned": [], "forced": [], "bias": [], "smoothing": 1.2}
        return {
            "signals": [SIGNAL], "rows": 875, "expert_counts": COUNTS, "table": table,
            "device_rows": [[80, 40], [60, 60]], "policy": policy, "acts": len(self.calls),
        }  # fmt: skip

    def act(self, act: str, **arguments: Any) -> dict[str, Any]:
        self.calls.append((act, arguments))
        return {"said": f"did {act}"}

    def diagnose(self, option: str) -> dict[str, Any]:
        self.named = option
        return {"diagnosis": option}

    def check(self) -> dict[str, Any]:
        return {"checks": {"devices": CHECK}, "acts": len(self.calls)}

    def hint(self) -> dict[str, Any]:
        return {"number": 1, "of": 3, "clue": "Count rows by expert."}

    def finish(self, reason: str = "finished") -> dict[str, Any]:
        proof = {"before": "a" * 64, "after": "a" * 64, "equal": True}
        part = {"earned": 30, "possible": 30, "remark": "counts only once repaired"}
        return {
            "reason": reason, "cause": "hot-expert", "solution": "Because.", "clues": 2,
            "diagnosis": self.named, "elapsed_s": 83.4, "title": "An end",
            "grade": {"passed": False, "points": 30, "possible": 100, "parts": {"cause": part}},
            "proof": {"restored": True, "hashes": {"weights": proof}},
        }  # fmt: skip

    def remark(self, text: str) -> dict[str, Any]:
        self.remarks.append({"at_s": 3.0, "who": "page", "said": text})
        return {"said": text}

    def close(self) -> None:
        self.running = False


@pytest.fixture
def drill(monkeypatch) -> Iterator[FakeDrill]:
    fake = FakeDrill(workbench.drills.find("hot-expert").briefing)

    def absent(*_: object) -> None:
        raise MachineError("no drill is running.")

    monkeypatch.setattr(workbench.drills, "start", lambda drill, **options: fake)
    monkeypatch.setattr(workbench.drills, "attach", absent)
    monkeypatch.setattr(Drills, "room", DrillRoom())
    yield fake


def visit(source: Any, *actions: tuple[str, Any]) -> Drills:
    """Open the page, do one action after the other, each to its end."""

    async def run() -> Drills:
        page = Drills(source, "light", {}, frame_of({}, "light"))
        for count, action in enumerate(actions, 1):
            page.page.actions = [[count, *action]]
            await settle(page)
        await settle(page)
        return page

    async def settle(page: Drills) -> None:
        for _ in range(3):
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
            page.tick(anyway=True)

    return asyncio.run(run())


START = ("start", "hot-expert")


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
    assert (values["y0"], values["y1"], values["y2h"]) == ("did force", "did smooth", True)
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
    assert values["stale"] == "stale" and values["y0"] == "did smooth"
    assert values["c0h"] and not values["no_checks"], "the check was of another engine"
    monkeypatch.setattr(drill_room, "STALE_S", 0.0)
    page.room.catch_up()
    page.tick(anyway=True)
    assert page.page.values["stale"] == "" and page.page.values["y0"] == "did smooth"
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
    assert page.page.values["y0"] == "did publish" and page.page.values["s0v"] == "2.28"


def test_what_is_to_be_known_of_a_signal_stands_beside_it(source, drill, monkeypatch):
    monkeypatch.setitem(SIGNAL, "message", "It may stay high.")
    page = visit(source, START)
    assert page.page.values["s0m"] == "It may stay high." and page.page.values["s1m"] == ""


def test_the_head_says_whose_status_it_is_while_a_drill_runs(source, drill):
    source.step(3)
    assert "engine of its own" not in visit(source).page.values["engine"]
    assert "engine of its own" in visit(source, START).page.values["engine"]


def test_a_start_shows_its_stages_and_can_be_cancelled(source, drill, monkeypatch):
    shown: list[dict[str, Any]] = []

    async def run() -> Drills:
        page = Drills(source, "light", {}, frame_of({}, "light"))

        def start(_: str, *, on_stage: Any, **__: Any) -> FakeDrill:
            for stage in (("engine", 0, 0), ("measuring", 2, 4)):
                on_stage(*stage)
                page.tick(anyway=True)
                shown.append(dict(page.page.values))
            assert 'data-send="cancel"' in page.page.skeleton
            page.room.cancel()
            on_stage("fault", 0, 0)
            raise AssertionError("a cancelled start goes no further")

        monkeypatch.setattr(workbench.drills, "start", start)
        page.page.actions = [[1, *START]]
        for _ in range(3):
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
            page.tick(anyway=True)
        return page

    page = asyncio.run(run())
    assert [shown[0][f"g{at}"] for at in range(5)] == ["◌", "·", "·", "·", "·"]
    assert [shown[1][f"g{at}"] for at in range(5)] == ["✓", "✓", "✓", "◌", "·"]
    assert shown[1]["g3n"] == "2 of 4" and shown[0]["g0n"] == ""
    assert page.room.phase == NONE and "was cancelled" in page.page.values["reason"]


def test_a_cancel_that_comes_too_late_ends_the_drill_all_the_same(source, drill, monkeypatch):
    def start(_: str, **__: Any) -> FakeDrill:
        Drills.room.cancel()
        return drill

    monkeypatch.setattr(workbench.drills, "start", start)
    page = visit(source, START)
    assert page.room.phase == NONE and not drill.running


def test_a_click_during_a_measurement_waits_its_turn_unless_the_drill_ends(source, drill):
    """Some seconds pass in a measurement; a repair that is then clicked must not be lost."""
    free, measure = threading.Event(), drill.observe

    def observe() -> dict[str, Any]:
        assert free.wait(10)
        return measure()

    async def run() -> Drills:
        page = Drills(source, "light", {}, frame_of({}, "light"))
        clicks = [("start", "hot-expert"), ("observe", None), ("act", {"act": "rebalance"})]
        clicks += [("finish", None), ("diagnose", {"option": "hot-expert"})]
        page.on_action(*clicks[0])
        while page.turns.said:
            await asyncio.sleep(0.01)
        drill.observe = observe
        for click in clicks[1:]:
            page.on_action(*click)
        free.set()
        while page.turns.said:
            await asyncio.sleep(0.01)
        return page

    page = asyncio.run(run())
    assert [act for act, _ in drill.calls] == ["rebalance"]
    assert page.room.phase == ENDED and drill.named is None
    assert "✓ did rebalance" in page.answers["rebalance"][1]


def test_wrong_words_in_a_form_are_one_sentence_and_change_nothing(source, drill):
    page = visit(source, START, ("act", {"act": "smooth", "bonus": "much"}))
    assert "bonus ('much') must be a number for smooth." in page.page.values["a-smooth"]
    visit(source, ("act", {"act": "explode"}), ("act", "x"), ("diagnose", {}))
    assert drill.calls == []


def test_the_end_shows_points_cause_and_the_proof_and_leads_back(source, drill):
    page = visit(source, START, ("diagnose", {"option": "torn-table"}), ("finish", ""))
    skeleton = page.page.skeleton
    assert page.room.phase == ENDED and "■ Not passed: 30 of 100 points" in skeleton
    assert "Restored, proven by hash" in skeleton and "aaaaaaaaaaaaaaaa…" in skeleton
    assert "Because." in skeleton and "counts only once repaired" in skeleton
    assert "An end" in skeleton and "workbench drill report" in skeleton
    assert "finished, after 1:23" in skeleton and "2 clues taken, which cost" in skeleton
    assert "<dt>cause named</dt><dd>✗ " in skeleton, "none was right"
    page.room.leave()
    page.tick(anyway=True)
    assert page.room.phase == NONE and 'data-send="start"' in page.page.skeleton


def test_a_drill_whose_time_is_up_or_whose_process_is_gone_ends_on_the_page(source, drill):
    page = visit(source, START)
    drill.phase = "ended"
    page.room.refresh(now=True)
    assert page.room.phase == ENDED and page.room.seen["finish"]["reason"] == "finished"
    page.room.leave()
    drill.phase, drill.running = "running", True
    page = visit(source, START)
    drill.running = False
    page.room.refresh(now=True)
    page.tick(anyway=True)
    assert "The drill is gone" in page.page.skeleton


def test_a_drill_that_cannot_start_says_why_and_the_list_stays(source, drill, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise MachineError("another drill runs.")

    monkeypatch.setattr(workbench.drills, "start", refuse)
    page = visit(source, START)
    assert page.page.values["reason"] == "another drill runs." and page.room.phase == NONE


def test_every_place_has_its_value_and_every_value_its_place_in_every_phase(source, drill):
    for actions in ((), (START,), (("finish", ""),)):
        page = visit(source, *actions)
        wanted = set(re.findall(r'data-bind(?:-[a-z-]+)?="([^"]+)"', page.page.skeleton))
        given = set(page.page.values) - {"beat"}
        assert given - wanted <= {"busy", "failure"}
        assert not {name for name in wanted - given if not re.fullmatch(r"c\d[ocnm]", name)}


def test_every_act_has_a_form_that_gives_back_its_arguments():
    forms = {form.name: form for form in acts.forms()}
    assert set(forms) == set(ACTS)
    move = acts.arguments(forms["move"], {"layer": "1", "expert": " 2 ", "device": "0"})
    assert move == {"layer": 1, "expert": 2, "device": 0}
    assert acts.arguments(forms["rebalance"], {}) == {}
    for name, typed in [("move", {"layer": "1"}), ("force", {"experts": ","}), ("bias", {})]:
        with pytest.raises(ConfigError):
            acts.arguments(forms[name], typed)


def test_an_incident_is_a_surprise_of_its_level_and_remarks_are_kept(source, drill, monkeypatch):
    asked: list[tuple[str, dict[str, Any]]] = []

    def start(drill_id: str, **options: Any) -> FakeDrill:
        asked.append((drill_id, options))
        return drill

    monkeypatch.setattr(workbench.drills, "start", start)
    page = visit(source, ("incident", "2"), ("remark", {"name": "ann", "text": "layer 2?"}))
    ((drill_id, options),) = asked
    assert workbench.drills.find(drill_id).level == 2 and options["surprise"]
    assert page.page.values["m0"] == "3 s · ann: layer 2?"
    visit(source, ("incident", "9"), ("remark", "x"))
    assert len(drill.remarks) == 1 and len(asked) == 1


def test_options_of_several_instances_are_told_apart():
    facts: dict[str, Any] = {"running": True, "starts": [], "ranks": {}, "jobs": []}
    one, two = {"seed": "0"}, {"seed": "77"}
    said = drill_words.deployment({"deployment": {**facts, "instances": [one]}})
    assert said["options"] == "seed 0"
    said = drill_words.deployment({"deployment": {**facts, "instances": [one, two]}})
    assert said["options"] == "instance 0: seed 0 · instance 1: seed 77"
