"""The page Drills from its list to a result: starts, cancels, refusals, ends and incidents."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Any

import pytest

import workbench.drills
from dashboards import acts, drill_result, drill_words
from dashboards.app import frame_of
from dashboards.drill_room import ENDED, NONE, RUNNING
from dashboards.pages.drills import Drills
from engine.errors import ConfigError, MachineError
from tests.dashboards.fake_drill import START, FakeDrill, visit
from workbench.drills.acts import ACTS


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
        clicks += [("finish", None)] * 2  # no cause is named
        clicks += [("diagnose", {"option": "hot-expert"})]
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
    assert "The last checks" in skeleton and "One still has more." in skeleton
    assert (
        '<td>1:20</td><td class="start">ann</td>' in skeleton
        and "<b>act</b> did smooth" in skeleton
    )
    assert ">this page</td>" in skeleton and "first change</dt><dd>after 80 s" in skeleton
    assert "finished, after 1:23" in skeleton and "2 clues taken, which cost" in skeleton
    assert "<dt>cause named</dt><dd>✗ " in skeleton, "none was right"
    page.room.leave()
    page.tick(anyway=True)
    assert page.room.phase == NONE and 'data-send="start"' in page.page.skeleton


def test_who_ends_a_drill_or_checks_it_without_a_cause_is_warned_first(source, drill):
    page = visit(source, START, ("check", ""))
    values = page.page.values
    assert "No cause is named yet" in values["check_warning"] and values["finish_warning"] == ""
    page.on_action("finish", "")
    page.tick(anyway=True)
    assert page.room.phase == RUNNING and "press once more" in page.page.values["finish_warning"]
    assert page.page.values["finish_word"] == "Finish without a cause"
    page = visit(source, ("check", ""), ("finish", ""), ("diagnose", {"option": "torn-table"}))
    values = page.page.values
    assert (values["check_warning"], values["finish_warning"]) == ("", "")
    assert values["finish_word"] == "Finish and grade"
    page = visit(source, ("finish", ""))
    assert page.room.phase == ENDED and drill.named == "torn-table"


def test_a_cause_that_is_being_noted_is_not_missed(source, drill):
    async def run() -> Drills:
        page = Drills(source, "light", {}, frame_of({}, "light"))
        for click in (START, ("diagnose", {"option": "hot-expert"}), ("finish", "")):
            if click[0] == "diagnose":
                while page.turns.said:
                    await asyncio.sleep(0.01)
            page.on_action(*click)
        while page.turns.said:
            await asyncio.sleep(0.01)
        return page

    page = asyncio.run(run())
    assert page.room.phase == ENDED and drill.named == "hot-expert"


def test_the_points_of_a_cause_that_was_not_named_say_why_they_are_missing(source, drill):
    part = {"cause": {"earned": 0, "possible": 30}}
    result = drill.finish() | {
        "grade": {"passed": False, "points": 0, "possible": 9, "parts": part}
    }
    for named, why in (("torn-table", "another was named"), (None, "none was named")):
        said = drill_result.ending(result | {"diagnosis": named}, {}, {})
        assert said["parts"] == [("cause", 0, 30, why)]


def test_a_result_without_a_proof_says_why(source, drill):
    result, briefing = drill.finish(), {"target": "http://service"}
    unproven = {"restored": False, "hashes": {}, "why": "it is silent. Its lease ends it."}
    said = drill_result.ending(result | {"proof": unproven}, briefing, {})
    assert said["why"] == unproven["why"] and said["facts"][0] == ("on", "http://service")
    said = drill_result.ending(result | {"proof": {"restored": True, "hashes": {}}}, {}, {})
    assert said["why"] == "Nothing was changed." and said["story"] == said["moments"] == []
    assert "lease" in drill_result.ending(None, briefing, {})["head"]


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
    for actions in ((), (START,), (("finish", ""), ("finish", ""))):
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
    page = visit(source, ("incident", "2"), ("name", "ann"), ("remark", {"text": "layer 2?"}))
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
