"""The page Now: its data equals the source's, texts keep their places, late frames are dropped."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import numpy as np
import pytest

from dashboards.app import frame_of
from dashboards.pages.now import NUM_SLOTS, Now
from dashboards.readings import expert_load
from dashboards.source import SOURCE_STATES
from engine.errors import RequestError
from engine.events import STAGES
from workbench import paths
from workbench.theme import STATES
from workbench.widgets import LOAD_TOP, decode_frame, encode_frame


def open_page(source, theme: str = "light", **chosen: str) -> Now:
    return Now(source, theme, chosen, frame_of(chosen, theme))


def drawn(page: Now) -> None:
    """Say what a browser says when it has drawn the newest values."""
    page.page.drawn = page.page.values["beat"]


def test_the_pages_numbers_are_the_sources(source):
    frame = source.step(30)
    values = open_page(source).page.values
    meta = frame.meta
    assert values["tokens"] == f"{meta['generated_per_s']:.0f}"
    assert values["rows"] == f"{meta['rows_per_s']:.0f}"
    assert values["running"] == str(meta["num_running"]) == "6"
    assert values["p50"] == f"{meta['step_p50_ms']:.2f}"
    assert values["overhead"] == f"{100 * meta['overhead_share']:.1f}"
    assert values["overhead_words"].endswith("within 5 %")
    assert values["cost"] == "1.2"
    for stage in STAGES:
        assert values[f"ms_{stage}"] == f"{meta['stage_ms'][stage]:.2f}"
    assert values["status"] == "Live" and values["reason"] == ""


def test_the_bundled_models_page_says_why_its_overhead_is_high_and_no_others_does(source):
    frame = source.step(30)
    assert "Tiny experts" not in open_page(source).page.skeleton
    engine = {**frame.meta["engine"], "model": str(paths.model_folder(paths.DEFAULT_MODEL))}
    source.frame = replace(frame, meta={**frame.meta, "engine": engine})
    page = open_page(source).page
    assert "Tiny experts: deciding weighs more here." in page.skeleton
    for kind in ("routing", "compute", "rest"):
        assert f'<span class="swatch-{kind}">{STATES[kind].word}</span>' in page.skeleton


def test_the_maps_cells_are_the_sources_on_the_fixed_scale(source):
    frame = source.step(30)
    page = open_page(source, domain="de")
    shown = decode_frame(page.map.pane.frame)
    share_LE = expert_load(frame, "de").share_LE
    assert (shown.low, shown.high) == (0.0, LOAD_TOP)
    wanted = decode_frame(encode_frame(share_LE, seq=1, time_s=0.0))
    np.testing.assert_array_equal(shown.cells_RC, wanted.cells_RC)
    other = decode_frame(encode_frame(expert_load(frame, "fr").share_LE, seq=1, time_s=0.0))
    assert (shown.cells_RC != other.cells_RC).any(), "another domain is another map"
    assert "German" in page.page.values["load_rows"]


def test_map_or_table_is_the_same_choice_on_the_page_and_inside_the_map(source):
    source.step(30)
    page = open_page(source, view="table")
    assert page.map.pane.view == "table" and page.page.values["table_pressed"] == "true"
    page.map.pane.view = "map"  # what the map's own key does
    page.tick(anyway=True)
    assert page.page.values["map_pressed"] == "true"


def test_an_idle_map_is_all_at_the_bottom_of_the_scale(source):
    source.step(30)
    source.wait(3.0)
    page = open_page(source)
    assert decode_frame(page.map.pane.frame).cells_RC.max() == 0


def test_the_map_fills_its_place(source):
    source.step(3)
    page = open_page(source)
    page.page.actions = [[1, "height", ["figure", 400]], [2, "height", "high"]]
    assert 300 < page.map.spec.height < 400
    page.page.actions = [[3, "height", ["figure", 10]]]
    assert page.map.spec.height >= 100, "never too low to be seen"


def test_the_texts_are_the_sources_and_keep_their_places(source):
    frame = source.step(5)
    page = open_page(source)
    requests = frame.meta["requests"]
    first = {slot: page.page.values[f"t{slot}"] for slot in range(6)}
    assert sorted(first.values()) == sorted(request["text"] for request in requests)
    assert page.page.values["p0"] == "the prompt "
    assert page.page.values["h5"] is False and page.page.values["h6"] is True
    places = list(page._slots)
    for _ in range(60):
        source.step(1)
        drawn(page)
        page.tick()
        listed = {request["id"] for request in source.frame.meta["requests"]}
        kept = [(a, b) for a, b in zip(places, page._slots, strict=True) if a in listed and a != b]
        running = {r["id"] for r in source.frame.meta["requests"] if r["state"] == "running"}
        assert not [a for a, _ in kept if a in running], "a running text never moves"
        assert running <= set(page._slots)
        places = list(page._slots)
    assert max(n for n in places if n is not None) > 5, "new requests must have come"


def test_more_texts_than_places_are_counted_not_squeezed(source):
    many = type(source)(running=NUM_SLOTS + 5)
    many.step(2)
    values = open_page(many).page.values
    assert values["texts_said"] == f"{NUM_SLOTS} of {NUM_SLOTS + 5} shown"


def test_a_page_before_the_engine_speaks_says_so_and_then_fits_it(source):
    source.frame, source.state, source.reason = None, "connecting", "waiting"
    page = open_page(source)
    assert page.page.values["status"] == "Connecting" and not page.map.pane.frame
    source.step(3)
    source.state = "live"
    page.tick(anyway=True)
    assert decode_frame(page.map.pane.frame).cells_RC.shape == (4, 8)
    assert page.map.spec.rows == ("0", "1", "2", "3")
    figure = page.page.figure
    source.step(3)
    page.tick(anyway=True)
    assert page.page.figure is figure, "panes are built once"


@pytest.mark.parametrize("state", SOURCE_STATES)
def test_every_state_is_shown_by_symbol_word_and_colour(source, state):
    source.step(3)
    source.state, source.reason = state, "because"
    values = open_page(source).page.values
    look = STATES[state]
    assert (values["status"], values["status_symbol"]) == (look.word, look.symbol)
    assert look.tone in values["status_class"] and values["reason"] == "because"
    if state in ("gone", "refused", "connecting", "loading"):
        assert values["tokens"] == values["p50"] == values["overhead"] == "–"


def test_a_browser_that_has_not_drawn_gets_the_newest_later_not_all(source):
    source.step(3)
    page = open_page(source)
    first = page.page.values["beat"]
    for _ in range(20):
        source.step(1)
        page.tick()
    assert page.page.values["beat"] == first, "nothing is queued for a slow browser"
    drawn(page)
    page.tick()
    assert page.page.values["beat"] == first + 1
    assert page.page.values["steps"] == f"{source.frame.meta['steps_per_s']:.0f}"


def test_nothing_new_is_not_sent_again(source):
    source.step(3)
    page = open_page(source)
    for _ in range(5):
        drawn(page)
        page.tick()
    assert page.page.values["beat"] == 1


def test_every_value_has_its_place_and_every_place_its_value(source):
    source.step(30)
    page = open_page(source, view="table")
    wanted = set(re.findall(r'data-bind(?:-[a-z-]+)?="([^"]+)"', page.page.skeleton))
    shown = set(page.page.values)
    used = {f"{kind}{slot}" for kind in "slnept" for slot in range(NUM_SLOTS)}
    assert wanted - shown <= used, "a place without a value"
    assert shown - wanted <= {"beat", "traffic_domain", "traffic_running"}, (
        "a value without a place"
    )


def test_choices_change_the_view_at_once(source):
    source.step(20)
    page = open_page(source)
    page.page.actions = [*page.page.actions, [1, "domain", "de"]]
    assert page.page.values["domain"] == "de"
    page.page.actions = [*page.page.actions, [2, "view", "table"]]
    assert page.page.values["table_pressed"] == "true"
    page.page.actions = [*page.page.actions, [3, "view", "hologram"]]
    page.page.actions = [*page.page.actions, [4, "domain", 7]]
    assert page.view == "table" and page.domain == "de"
    assert page.map.pane.view == "table"


def test_actions_that_arrive_together_all_count_and_none_counts_twice(source):
    source.step(3)
    page = open_page(source)
    done: list[tuple[str, str]] = []
    page.page._act = lambda name, value: done.append((name, value))
    page.page.actions = [[1, "view", "table"], [2, "domain", "de"]]
    page.page.actions = [[1, "view", "table"], [2, "domain", "de"], [3, "view", "map"]]
    page.page.actions = [["x"], [4], None, [4, "view", "table"]]
    assert done == [("view", "table"), ("domain", "de"), ("view", "map"), ("view", "table")]


def test_what_a_model_or_an_address_says_stays_text(source):
    source.step(3)
    page = open_page(source, domain='"><script>alert(1)</script>')
    assert "<script>" not in page.page.skeleton
    assert "&lt;script&gt;" in page.page.skeleton


def test_pausing_goes_to_the_engine_and_a_refusal_is_shown(source):
    source.facts["paused"] = False
    source.step(3)
    page = open_page(source)
    assert page.page.values["pause"] == "pause" and not page.page.values["no_pause"]

    async def press(count: int) -> None:
        page.page.actions = [*page.page.actions, [count, "pause", "pause"]]
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})

    asyncio.run(press(1))
    assert source.controls == [("traffic", {"paused": True})]
    source.refusal = RequestError("traffic was not sent: the engine is not connected.")
    asyncio.run(press(2))
    page.tick(anyway=True)
    assert page.page.values["reason"] == str(source.refusal)


def test_an_engine_without_that_control_has_no_pause_button(source):
    source.step(3)
    assert open_page(source).page.values["no_pause"]


def test_the_traffic_chooser_goes_to_the_engine_and_shows_what_it_says(source):
    source.facts |= {"paused": False, "running": 8, "domain": "all", "domains": ["de", "en"]}
    source.step(3)
    page = open_page(source)
    assert page.page.values["traffic_domain"] == "all"
    assert page.page.values["traffic_running"] == "8"

    async def choose() -> None:
        page.page.actions = [[1, "traffic_domain", "de"], [2, "traffic_running", "16"]]
        page.page.actions = [*page.page.actions, [3, "traffic_running", "many"]]
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})

    asyncio.run(choose())
    assert source.controls == [("traffic", {"domain": "de"}), ("traffic", {"running": 16})]
    source.facts |= {"domain": "de", "running": 5}
    source.step(1)
    page.tick(anyway=True)
    assert page.page.values["traffic_domain"] == "de"
    assert page.page.values["traffic_running"] == "5"
    assert '<option value="5">' in page.page.skeleton, "a number of the command line can be shown"


def test_an_engine_without_a_chooser_has_none(source):
    source.step(3)
    assert "traffic_domain" not in open_page(source).page.skeleton
