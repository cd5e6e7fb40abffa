"""The page Step: what it shows is what the step recorded."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dashboards.app import frame_of
from dashboards.pages.step import NUM_FULL, NUM_OTHER, Step
from dashboards.source import Snapshot
from dashboards.steps import KEPT, MAX_KEPT, Listed, Shelf, grown
from engine import Engine, EngineConfig
from engine.errors import RequestError
from engine.events import Event
from engine.runtime.telemetry import Aggregator
from workbench import paths
from workbench.trace import Trace
from workbench.traffic import Prompt, Traffic
from workbench.widgets import State, stepper_state
from workbench.widgets.steps import MAX_TOKENS
from workbench.window import Window


class EngineSource:
    """A real engine and its recent past, in this very thread."""

    enabled = True

    def __init__(self, **bounds: int) -> None:
        self.sums, self.recorder = Aggregator(), Window(**bounds)
        config = EngineConfig(model=paths.model_folder(paths.DEFAULT_MODEL), num_devices=4)
        self.engine = Engine(config, sink=self)
        self.traffic = Traffic([Prompt("en", "The server"), Prompt("de", "Der Server")], 3)
        self.looking_ms, self.seq = 0.0, 0
        self.refusal: Exception | None = None

    def emit(self, event: Event) -> None:
        self.sums.add([event])
        self.recorder.emit(event)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.traffic.step(self.engine)

    def snapshot(self) -> Snapshot:
        self.seq += 1
        frame = self.sums.frame(self.seq, 1e9)
        facts = {"model_folder": str(self.engine.config.model), "paused": False}
        return Snapshot("live", "", replace(frame, meta={**frame.meta, "facts": facts}), ())

    def control(self, action: str, **detail: Any) -> Mapping[str, Any]:
        if self.refusal:
            raise self.refusal
        assert action == "watch"
        return {"request_id": self.traffic.watch(self.engine, detail.get("text"))}

    def window(self) -> Trace:
        return self.recorder.trace()

    def tokens(self) -> Any:
        return self.engine.tokenizer


@pytest.fixture
def running() -> Iterator[EngineSource]:
    source = EngineSource()
    with closing(source.engine):
        yield source


@pytest.fixture
def forgetful() -> Iterator[EngineSource]:
    """The same with a ring of a few steps."""
    source = EngineSource(max_rows=40)
    with closing(source.engine):
        yield source


def visit(source: Any, *steps: Any, **chosen: str) -> Step:
    """Open the page inside a loop, then do the steps, letting what was asked settle after each."""

    async def run() -> Step:
        page = Step(source, "light", chosen, frame_of(chosen, "light"))
        await settle(page)
        for step in steps:
            step(page)
            page.recent.refresh(now=True)
            await settle(page)
        return page

    return asyncio.run(run())


async def settle(page: Step) -> None:
    for _ in range(4):
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
        page.tick(anyway=True)


def act(*action: Any) -> Any:
    def do(page: Step) -> None:
        page.page.actions = [*page.page.actions, [len(page.page.actions) + 1, *action]]

    return do


def test_an_own_text_is_stepped_with_the_decision_its_step_recorded(running):
    running.step(3)
    page = visit(
        running,
        act("write", {"text": "Der Server ist"}),
        lambda _: running.step(6),
    )
    state = json.loads(page.stepper.state)
    assert state["request"] == {"id": page.shown, "label": "yours", "ended": ""}
    assert "".join(token["text"] for token in state["tokens"][1:]).startswith("Der·Server·ist")
    recorded = [d for d in running.window().decisions if d.request_id == page.shown]
    assert len(recorded) == 4 * len(state["tokens"]) > 0
    for decision in recorded:
        layer = state["tokens"][decision.position]["layers"][decision.layer]
        np.testing.assert_array_equal(np.float32(layer["full"]["logits"]), decision.logits)
        np.testing.assert_array_equal(np.float32(layer["full"]["scores"]), decision.scores)
        assert layer["topk_ids"] == decision.topk_ids.tolist()
        assert layer["full"]["runner_up"] == decision.runner_up
        assert layer["devices"] == decision.devices.tolist()


def test_somebody_who_just_opens_the_page_gets_something_to_step_through_once(running):
    running.step(3)
    page = visit(running, lambda _: running.step(5), lambda _: running.step(2))
    full = {d.request_id for d in running.window().decisions}
    assert full == {page.shown} and page.page.values["f0v"] == str(page.shown)
    assert page.page.values["f0c"] == "true" and page.page.values["no_full"]


def test_a_reader_who_is_quicker_than_the_first_reading_gets_their_own_text(running):
    """On a busy machine the recent past is read late; by then the reader has asked."""
    running.step(3)

    async def hurry() -> Step:
        page = Step(running, "light", {}, frame_of({}, "light"))
        act("write", {"text": "Der Server ist"})(page)
        for _ in range(3):
            await settle(page)
            running.step(2)
            page.recent.refresh(now=True)
        await settle(page)
        return page

    page = asyncio.run(hurry())
    assert json.loads(page.stepper.state)["request"]["label"] == "yours"
    asked = [event for event in running.window().requests if event.kind == "added"]
    assert [event.label for event in asked].count("yours") == 1 and len(asked) == 3 + 1


def test_a_request_that_grows_keeps_the_readers_place(running):
    running.step(3)

    def read_on(page: Step) -> None:
        page.stepper.token, page.stepper.layer, page.stepper.stage = 3, 2, "select"
        before.append(len(json.loads(page.stepper.state)["tokens"]))
        running.step(4)

    before: list[int] = []
    page = visit(running, lambda _: running.step(5), read_on)
    assert len(json.loads(page.stepper.state)["tokens"]) > before[0] > 3
    assert (page.stepper.token, page.stepper.layer, page.stepper.stage) == (3, 2, "select")


def test_any_recent_request_can_be_chosen_and_is_compact_where_nobody_watched(running):
    running.step(4)
    page = visit(running, lambda _: running.step(4), act("request", "1"))
    state = json.loads(page.stepper.state)
    assert state["request"]["id"] == page.shown == 1
    assert all(layer["full"] is None for token in state["tokens"] for layer in token["layers"])
    row = running.window().rows_of(1)[2]
    ids = running.window().columns["rows/topk_ids"][row]
    assert [layer["topk_ids"] for layer in state["tokens"][2]["layers"]] == ids.tolist()
    other = visit(running, request="2")
    assert other.shown == 2, "the address names a request"


def test_the_address_holds_the_view_and_a_reload_comes_back_to_it(running):
    running.step(6)

    def look(page: Step) -> None:
        page.stepper.param.update(token=3, layer=2, stage="place", view="table")

    page = visit(running, act("request", "1"), look)
    address = page.page.values["address"]
    assert address == {
        "request": "1", "token": "3", "layer": "2", "stage": "place", "view": "table"
    }  # fmt: skip
    again = visit(running, **address)
    assert again.shown == 1
    stepper = again.stepper
    assert (stepper.token, stepper.layer, stepper.stage, stepper.view) == (3, 2, "place", "table")
    assert again.page.values["address"] == address
    other = visit(running, act("request", "2"), **address)
    assert other.stepper.token == 0 and other.page.values["address"]["request"] == "2"


@pytest.mark.parametrize(
    "nonsense",
    [{"token": "99999"}, {"token": "-1"}, {"layer": "x"}, {"stage": "<b>"}, {"view": "none"}],
)
def test_an_address_that_names_nothing_opens_the_request_at_its_beginning(running, nonsense):
    running.step(4)
    page = visit(running, request="1", **nonsense)
    assert page.shown == 1
    assert (page.stepper.token, page.stepper.layer, page.stepper.stage) == (0, 0, "gate")
    assert page.stepper.view == "picture"


def test_a_ring_that_evicts_takes_nothing_from_the_request_that_is_read(forgetful):
    forgetful.step(2)
    page = visit(forgetful, act("write", {"text": "Der Server ist"}), lambda _: forgetful.step(3))
    page.stepper.token = 4
    shown, before = page.shown, json.loads(page.stepper.state)["tokens"]
    assert before[4]["position"] == 4 and before[0]["position"] == 0
    for _ in range(12):
        forgetful.step(2)
        page.recent.refresh(now=True)
        page.tick(anyway=True)
    columns = forgetful.window().columns
    ring = columns["rows/positions"][columns["rows/request_ids"] == shown]
    assert len(ring) and ring.min() > 4, "the ring has forgotten the prompt and the reader's token"
    state = json.loads(page.stepper.state)
    assert state["tokens"][: len(before)] == before, "full records and where the prompt ended too"
    assert all(layer["full"] for layer in before[0]["layers"])
    assert [token["position"] for token in state["tokens"]] == list(range(ring.max() + 1))
    assert all(token["generated"] for token in state["tokens"][len(before) :])
    assert state["request"]["label"] == "yours"
    assert (page.shown, page.stepper.token) == (shown, 4)


def held_and_read(running: EngineSource) -> tuple[Any, Any]:
    running.step(8)
    held = stepper_state(running.window(), 1)
    return held, json.loads(json.dumps(held))


def test_a_better_row_of_a_held_token_replaces_it_and_a_worse_one_does_not(running):
    held, read = held_and_read(running)
    read["tokens"][2].update(cause="recomputed", runs=3, step=99)
    assert grown(held, read)["tokens"][2] == {**held["tokens"][2], "runs": 3}
    assert grown(read, held)["tokens"][2] == {**held["tokens"][2], "runs": 3}
    read["tokens"][2] = {**held["tokens"][2], "step": 99}
    read["tokens"][2]["layers"] = [{**la, "full": {}} for la in held["tokens"][2]["layers"]]
    assert grown(held, read)["tokens"][2] == read["tokens"][2]
    assert grown(read, held)["tokens"][2] == read["tokens"][2]


def test_another_request_under_the_same_number_is_not_mixed_with_the_one_held(running):
    held, read = held_and_read(running)
    assert grown(held, read) == held
    read["tokens"] = read["tokens"][1:]
    assert grown(held, read) == held
    read["tokens"][1]["id"] += 1
    assert grown(held, read) == read


def test_a_request_longer_than_the_stepper_shows_is_cut_at_its_end_and_says_so(running):
    held, read = held_and_read(running)
    last = held["tokens"][-1]
    more = [{**last, "position": n} for n in range(last["position"] + 1, 2 * MAX_TOKENS)]
    read["tokens"] = more
    state = grown(held, read)
    assert [token["position"] for token in state["tokens"]] == list(range(MAX_TOKENS))
    assert state["note"] == f"the first {MAX_TOKENS} tokens" and held["note"] == ""
    assert grown(state, read) == state


def test_a_request_that_is_not_there_any_more_is_told_from_one_that_is_not_there_yet(running):
    running.step(4)
    running.engine.abort(1)
    running.recorder.clear()
    running.step(2)
    listed = running.window().columns["rows/request_ids"]
    assert 1 not in listed and len(listed)
    assert "has left the recent past" in visit(running, request="1").page.values["said"]
    assert visit(running, request="7777").page.values["said"] == "Waiting for request 7777"


def test_what_has_left_the_recent_past_is_kept_and_said(running):
    running.step(4)
    page = visit(running, lambda _: running.step(4))
    shown = page.stepper.state
    running.recorder.clear()
    page.recent.refresh(now=True)  # no loop: read at once
    page.tick(anyway=True)
    assert "has left the recent past" in page.page.values["said"]
    assert page.stepper.state == shown
    values = page.page.values
    assert (values["f0v"], values["f0s"], values["f0c"]) == (str(page.shown), "kept", "true")
    assert not values["f0h"] and values["f1h"]


def test_what_was_recorded_in_full_is_there_for_a_reload_and_the_next_reader(running):
    """The recent past is some seconds long: somebody who reads one token outlasts it."""
    running.step(4)
    page = visit(running, lambda _: running.step(4))
    shown = page.shown
    running.recorder.clear()
    running.step(2)
    again = visit(running, request=str(shown), token="3", layer="1")
    before, after = (json.loads(visitor.stepper.state)["tokens"] for visitor in (page, again))
    assert again.shown == shown and len(before) > 3
    assert after[: len(before)] == before, "it still runs, and may have grown"
    assert again.page.values["address"]["token"] == "3"
    assert visit(running).shown == shown, "the newest recorded in full, though kept"


def test_a_shelf_is_bounded_and_forgets_what_an_engine_before_this_one_ran():
    shelf, layer = Shelf(), {"full": {"logits": [0.0]}}

    def state(n: int, full: dict[str, Any] | None) -> State:
        token = {"position": 0, "id": 1, "layers": [{**layer, "full": full}]}
        return {"request": {"id": n, "label": "en"}, "engine": {}, "tokens": [token], "note": ""}

    for n in range(MAX_KEPT + 2):
        shelf.complete(n, state(n, layer["full"]))
    shelf.complete(99, state(99, None))
    assert shelf.complete(99, None) is None, "compact records are not kept"
    kept = shelf.besides(())
    assert [line.id for line in kept] == list(range(MAX_KEPT + 1, 1, -1))
    assert {(line.tokens, line.full, line.ended) for line in kept} == {(1, 1, KEPT)}
    listed = (Listed(5, "en", 1, 1, ""),)
    assert [line.id for line in shelf.besides(listed)] == [4, 3, 2], "those above 5 are older runs'"


def test_a_refusal_is_said_and_nonsense_is_ignored(running):
    running.step(2)
    running.refusal = RequestError("a text must have 1 to 2000 characters, not 9000.")
    page = visit(running, act("watch", ""))
    page.tick(anyway=True)
    assert page.page.values["reason"] == str(running.refusal)
    running.refusal = None
    before = len(running.window().requests)
    nonsense = [act("write", {"text": "  "}), act("write", "x"), act("request", "9" * 30 + "x")]
    visit(running, *nonsense)
    added = running.window().requests[before:]
    assert all(event.label != "yours" for event in added)


def test_places_are_stable_and_every_place_has_its_value(source):
    source.step(10)
    page = visit(source)
    wanted = set(re.findall(r'data-bind(?:-[a-z-]+)?="([^"]+)"', page.page.skeleton))
    places = {f"f{n}{x}" for n in range(NUM_FULL) for x in "hvntsc"}
    places |= {f"o{n}{x}" for n in range(NUM_OTHER) for x in "hvntsc"}
    assert wanted - places == set(page.page.values) - places - {"beat", "address"}
    held = list(page._others)
    for _ in range(30):
        source.step(5)
        page.recent.refresh(now=True)
        page.tick(anyway=True)
        kept = [(a, b) for a, b in zip(held, page._others, strict=True) if a is not None]
        listed = {request.id for request in page.recent.value.requests}
        assert all(a == b for a, b in kept if a in listed)
        held = list(page._others)
    assert 'data-send="watch"' not in page.page.skeleton, "an invented engine takes no requests"
