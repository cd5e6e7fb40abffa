"""The page Demo with a source whose facts the test chooses."""

from __future__ import annotations

import hashlib

import pytest

from dashboards.app import ROUTES
from dashboards.pages.demo import Demo
from tests.dashboards.conftest import FakeSource
from tests.demos.conftest import DEMO
from workbench.demos.playlist import find

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


@pytest.mark.parametrize("at", range(len(STEPS)))
def test_every_step_can_be_drawn(source, at):
    lead(source, at)
    page = visit(source)
    assert f'data-step="{STEPS[at].id}"' in page.page.skeleton
    assert page.page.values["overhead"] != ""
