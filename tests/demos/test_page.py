"""The page Demo with a source whose facts the test chooses."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from dashboards.app import ROUTES
from dashboards.pages.demo import Demo
from tests.dashboards.conftest import FakeSource
from tests.demos.conftest import DEMO
from tests.widgets.examples import long_request
from workbench.demos.playlist import find
from workbench.widgets.steps import state_json, stepper_state

FRAME = {"routes": [], "other_theme": {"name": "dark", "word": "Dark", "href": "?theme=dark"}}
KEY = "secret"
STEPS = find(DEMO).steps


def check(state: str, value: float | None) -> dict:
    return {"name": "n", "value": value, "low": 0.0, "high": 0.5, "unit": "share", "state": state}


@pytest.fixture
def source() -> FakeSource:
    source = FakeSource()
    lead(source, 0)
    return source


def lead(source: FakeSource, at: int, **facts: object) -> None:
    """Let the engine's process say that the presenter is on this step."""
    source.facts = {
        "demo": {
            "id": DEMO,
            "key_sha256": hashlib.sha256(KEY.encode()).hexdigest(),
            "ready": True,
            "at": at,
            "visit": at + 1,
            "exhibit": False,
            "focus": None,
            "done": [],
            "checks": [check("holds", 0.25), check("waiting", None)],
            **facts,
        }
    }
    source.step(2)


def visit(source: FakeSource, **chosen: str) -> Demo:
    return Demo(source, "light", chosen, FRAME)


def test_the_page_is_in_the_table_of_pages():
    assert ("/demo", "Demo") in [(route.path, route.title) for route in ROUTES]


def test_a_viewer_follows_and_sees_text_and_measurements_but_no_notes(source):
    page = visit(source)
    assert STEPS[0].title in page.page.skeleton and STEPS[0].say[0] not in page.page.skeleton
    values = page.page.values
    assert values["role"] == "● Following the presenter"
    assert (values["cs0"], values["cv0"], values["cb0"]) == ("✓", "25.0 %", "at most 50 %")
    assert values["cv1"] == "–"
    lead(source, 5)
    page.tick(anyway=True)
    assert STEPS[5].title in page.page.skeleton


def test_a_viewer_explores_alone_and_comes_back(source):
    page = visit(source)
    page.act("next", "")
    page.act("next", "")
    assert f'data-step="{STEPS[2].id}"' in page.page.skeleton and source.controls == []
    assert page.page.values["role"] == "◇ Exploring; the presenter is on step 1"
    assert page.page.values["cv0"] == "–", "measurements of another step are not shown"
    lead(source, 3)
    page.tick(anyway=True)
    assert f'data-step="{STEPS[2].id}"' in page.page.skeleton, "who explores is left alone"
    page.act("follow", "")
    assert f'data-step="{STEPS[3].id}"' in page.page.skeleton


def test_the_address_keeps_the_step_of_who_explores(source):
    page = visit(source, step="3")
    assert f'data-step="{STEPS[2].id}"' in page.page.skeleton
    assert page.page.values["address"] == {"step": "3"}
    page.act("follow", "")
    assert page.page.values["address"] == {"step": None}
    assert f'data-step="{STEPS[-1].id}"' in visit(source, step="99").page.skeleton
    assert f'data-step="{STEPS[0].id}"' in visit(source, step="x").page.skeleton
    led = visit(source, step="3", key=KEY)
    assert f'data-step="{STEPS[0].id}"' in led.page.skeleton


def test_a_wrong_key_is_a_viewer(source):
    page = visit(source, key="guess")
    page.act("last", "")
    assert source.controls == [] and STEPS[0].say[0] not in page.page.skeleton


def test_the_presenter_has_notes_and_asks_the_engines_process(source, monkeypatch):
    page = visit(source, key=KEY)
    assert page.page.values["role"] == "● You present"
    assert all(note in page.page.skeleton.replace("&#39;", "'") for note in STEPS[0].say)
    asked = []
    monkeypatch.setattr(page, "ask", lambda action, **detail: asked.append((action, detail)))
    page.act("next", "")
    page.act("back", "")  # already on the first: nothing to ask
    page.act("jump", "4")
    page.act("jump", "x")
    assert asked == [
        ("demo", {"key": KEY, "to": 1}),
        ("demo", {"key": KEY, "to": 4}),
    ]


def test_the_map_shows_the_sources_numbers(source):
    page = visit(source)
    from dashboards import readings

    assert page.map.pane.frame, "nothing was drawn"
    load = readings.expert_load(source.frame)
    assert load is not None and load.share_LE.shape == (4, 8)
    lead(source, 2)
    page.tick(anyway=True)
    assert '"domain"' in page.map.pane.spec


def test_without_a_presenter_the_page_is_read_alone(source):
    source.facts = {}
    source.step(1)
    page = visit(source)
    assert page.page.values["role"].startswith("○ No presenter")
    page.act("next", "")
    assert f'data-step="{STEPS[1].id}"' in page.page.skeleton
    page.act("back", "")
    page.act("back", "")
    assert f'data-step="{STEPS[0].id}"' in page.page.skeleton


ALONE = "You read this tour; nothing is changed on the engine."


@pytest.mark.parametrize("at", range(len(STEPS)))
def test_without_a_presenter_no_step_claims_what_nobody_does(source, at):
    source.facts = {}
    source.step(1)
    page = visit(source, step=str(at + 1))
    skeleton, values, step = page.page.skeleton, page.page.values, STEPS[at]
    assert ALONE in skeleton and f"workbench demo present {DEMO}" in skeleton
    assert skeleton.index(ALONE) < skeleton.index(f'data-step="{step.id}"')
    needs_presenter = bool(step.actions) or step.view["kind"] == "stepper"
    assert ("data-told" in skeleton) == needs_presenter
    if step.actions:
        assert "When this tour is presented, it changes the engine so that:" in skeleton
        assert "This is the engine as it is now" in skeleton
    assert 'data-child="second"' not in skeleton, "no empty place for what nobody records"
    assert 'data-bind="cv0"' not in skeleton, "no dashes where nothing will be measured"
    assert values["cb0"], "what should be measured is said all the same"


def test_who_reads_alone_sees_the_texts_of_a_step_counted_alone_and_the_rest_marked(source):
    source.facts = {}
    source.step(1)
    german = next(at for at, step in enumerate(STEPS) if step.id == "only-german")
    broken = next(at for at, step in enumerate(STEPS) if step.id == "broken")
    page = visit(source, step=str(german + 1))
    assert "Load by layer, German texts only" in page.page.skeleton
    assert "broken only when presented" not in page.page.skeleton
    assert page._counted(source.snapshot()) == "de"
    page = visit(source, step=str(broken + 1))
    assert "Load by layer, German texts only" in page.page.skeleton
    assert "broken only when presented" in page.page.skeleton
    lead(source, german)
    page = visit(source)
    assert "texts only" not in page.page.skeleton, "who presents has nothing else sent"
    assert page._counted(source.snapshot()) == "all"


def test_the_marks_go_when_the_presenter_comes_and_are_there_for_who_explores(source):
    broken = next(at for at, step in enumerate(STEPS) if step.id == "broken")
    lead(source, broken)
    page = visit(source)
    assert ALONE not in page.page.skeleton and "data-told" not in page.page.skeleton
    assert 'data-bind="cv0"' in page.page.skeleton
    lead(source, 0)
    page = visit(source, step=str(broken + 1))
    assert "When the presenter is on this step, it changes the engine" in page.page.skeleton
    assert ALONE not in page.page.skeleton
    lead(source, broken)
    page.tick(anyway=True)
    assert "data-told" not in page.page.skeleton


@pytest.mark.parametrize("at", range(len(STEPS)))
def test_every_step_can_be_drawn(source, at):
    lead(source, at)
    page = visit(source)
    assert f'data-step="{STEPS[at].id}"' in page.page.skeleton
    assert page.page.values["overhead"] != ""


STEPPER = next(at for at, step in enumerate(STEPS) if step.view["kind"] == "stepper")


async def settle(*pages: Demo) -> None:
    for _ in range(3):
        for page in pages:
            page.tick(anyway=True)
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})


def settled(*pages: Demo) -> None:
    """Let what was asked on other threads come back, and draw."""
    asyncio.run(settle(*pages))


def opened(source: FakeSource, *visitors: dict[str, str]) -> list[Demo]:
    """Open the page for each visitor and let it settle."""

    async def run() -> list[Demo]:
        pages = [visit(source, **chosen) for chosen in visitors]
        await settle(*pages)
        return pages

    return asyncio.run(run())


@pytest.fixture
def exhibited(source, monkeypatch):
    """Let the presenter be on the step with the stepper, its text written."""
    answers = {"demo_exhibit": {"state": state_json(stepper_state(long_request()))}}
    asked = []

    def control(action, **detail):
        asked.append((action, detail))
        return answers.get(action, {})

    monkeypatch.setattr(source, "control", control)
    lead(source, STEPPER, exhibit=True)
    return source, asked


def test_who_reads_alone_has_the_text_written_once_for_all_and_steps_through_it(
    source, monkeypatch
):
    source.facts = {"model_folder": "somewhere"}
    source.step(1)
    trace, asked = long_request(), []
    monkeypatch.setattr(source, "window", lambda: trace)

    def control(action, **detail):
        asked.append((action, detail))
        return {"request_id": 0}

    monkeypatch.setattr(source, "control", control)
    place = {"step": str(STEPPER + 1)}
    pages = opened(source, place, place)
    view = STEPS[STEPPER].view
    assert asked == [("watch", {"text": view["text"]})]
    for page in pages:
        assert page._here() == (view["token"], view["layer"], "gate")
        assert 'data-child="second"' in page.page.skeleton
        assert "data-told" not in page.page.skeleton, "what the step says can be seen"
        page.stepper.token = 1
    settled(*pages)
    assert pages[0]._here()[0] == 1 and len(asked) == 1


def test_the_presenter_leads_the_stepper_and_each_follower_goes_there(exhibited):
    source, asked = exhibited
    presenter, follower = opened(source, {"key": KEY}, {})
    view = STEPS[STEPPER].view
    assert follower._here() == presenter._here() == (view["token"], view["layer"], "gate")
    assert not [ask for ask in asked if ask[0] == "demo_focus"], "opening the page leads nobody"

    presenter.stepper.token, presenter.stepper.stage = 7, "place"
    settled(presenter, follower)
    focus = {"token": 7, "layer": view["layer"], "stage": "place"}
    assert [ask for ask in asked if ask[0] == "demo_focus"] == [
        ("demo_focus", {"key": KEY, **focus})
    ]
    lead(source, STEPPER, exhibit=True, focus=focus)
    settled(presenter, follower)
    assert follower._here() == presenter._here() == (7, view["layer"], "place")
    (late,) = opened(source, {})
    assert late._here() == follower._here(), "who comes late is at the same place"


def test_a_follower_may_look_around_until_the_presenter_moves_or_they_follow_again(exhibited):
    source, asked = exhibited
    (page,) = opened(source, {})
    start = page._here()
    page.stepper.token = 1
    settled(page)
    assert page._here()[0] == 1 and not [ask for ask in asked if ask[0] == "demo_focus"]
    page.act("follow", "")
    settled(page)
    assert page._here() == start
    page.stepper.token = 1
    lead(source, STEPPER, exhibit=True, focus={"token": 5, "layer": 0, "stage": "select"})
    settled(page)
    assert page._here() == (5, 0, "select")


def test_who_explores_is_not_taken_along(exhibited):
    source, _ = exhibited
    (page,) = opened(source, {"step": str(STEPPER + 1)})
    lead(source, STEPPER, exhibit=True, focus={"token": 5, "layer": 0, "stage": "select"})
    settled(page)
    assert page._here() != (5, 0, "select")
