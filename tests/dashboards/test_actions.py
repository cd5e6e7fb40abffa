"""What a page may ask of the engine's process, with the real engine and over the real stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from dashboards.source import LiveSource
from engine import Engine, EngineConfig
from engine.errors import RequestError, TraceError, WorkbenchError
from engine.events import Tee
from engine.runtime.telemetry import Telemetry
from workbench import paths
from workbench.actions import serve_actions
from workbench.desk import Desk
from workbench.trace.schema import COLUMNS
from workbench.traffic import Prompt, Traffic
from workbench.window import Window, pack, unpack


class Works:
    """An engine's process in this one: call `ask` from its thread, the engine steps meanwhile."""

    def __init__(self, telemetry: Telemetry, desk: Desk, engine: Engine, traffic: Traffic) -> None:
        self.telemetry, self.desk = telemetry, desk
        self.engine, self.traffic = engine, traffic
        self.window: Window
        self.source = LiveSource(telemetry.address, telemetry.key)

    def until(self, done: Callable[[], Any]) -> Any:
        end = time.monotonic() + 60
        while not (result := done()):
            assert time.monotonic() < end
            self.desk.serve(0.001)
            self.traffic.step(self.engine)
        return result

    def ask(self, action: str, **detail: Any) -> Any:
        answer = self.desk.take(action, detail)
        self.until(answer.done)
        return answer.result()


@pytest.fixture
def works() -> Iterator[Works]:
    prompts = [Prompt("en", "The server"), Prompt("de", "Der Server")]
    window = Window()
    with closing(Desk()) as desk, closing(Telemetry(on_control=desk.take)) as telemetry:
        config = EngineConfig(model=paths.model_folder(paths.DEFAULT_MODEL), num_devices=4)
        with closing(Engine(config, sink=Tee((telemetry, window)))) as engine:
            works = Works(telemetry, desk, engine, Traffic(prompts, 2))
            works.window = window
            serve_actions(desk, engine, works.traffic, telemetry, window)
            with closing(works.source):
                yield works


def test_the_window_that_arrives_is_the_window_that_was_recorded(works):
    source = works.source
    works.until(lambda: source.snapshot().state == "live")
    number = works.ask("watch", text="Der Server ist")["request_id"]
    works.until(lambda: works.window.trace().decisions)
    for _ in range(3):
        works.traffic.step(works.engine)
    here = works.window.trace()
    there = source.window()  # answered aside: the engine need not step
    assert there.start == here.start and there.notes == here.notes
    for name in COLUMNS:
        np.testing.assert_array_equal(there.columns[name], here.columns[name], err_msg=name)
    assert {decision.request_id for decision in there.decisions} == {number}
    for one, other in zip(there.decisions, here.decisions, strict=True):
        np.testing.assert_array_equal(one.logits, other.logits)
        assert one.reasons == other.reasons and one.source == other.source
    assert source.window() is there, "asked once for all who look at the same time"
    assert source.looking_ms > 0
    tokens = source.tokens()
    assert tokens is not None
    assert tokens.token_bytes(int(there.decisions[-1].token_id)) == (
        works.engine.tokenizer.token_bytes(int(there.decisions[-1].token_id))
    )


def test_choices_are_told_in_every_frame_and_wrong_ones_are_refused(works):
    works.ask("traffic", domain="de", running=3)
    works.until(lambda: (works.telemetry.latest or 0) and works.telemetry.latest.meta["facts"])
    works.until(lambda: works.telemetry.latest.meta["facts"].get("domain") == "de")
    facts = works.telemetry.latest.meta["facts"]
    assert (facts["running"], facts["paused"]) == (3, False)
    assert facts["domains"] == ["de", "en"]
    for action, detail, words in [
        ("traffic", {"paused": 1}, "paused"),
        ("traffic", {"running": True}, "running"),
        ("traffic", {"speed": 2}, "unknown detail 'speed'"),
        ("watch", {"text": ""}, "1 to 2000"),
        ("watch", {"text": "x" * 3000}, "1 to 2000"),
        ("watch", {"text": ["x"]}, "text"),
    ]:
        with pytest.raises(RequestError, match=words):
            works.ask(action, **detail)


def test_a_window_before_the_engine_and_an_answer_of_another_kind_are_one_sentence():
    with pytest.raises(TraceError, match="nothing was recorded"):
        Window().packed({})
    for answer in ({}, {"start": 1}):
        with pytest.raises(TraceError, match="unknown form"):
            unpack(answer)


def test_packing_loses_nothing(works):
    for _ in range(5):
        works.traffic.step(works.engine)
    trace = works.window.trace()
    again = unpack(pack(trace))
    assert again.start == trace.start and again.num_rows == trace.num_rows > 0
    assert not any(type(note).__name__ == "TextEvent" for _, note in again.notes)


def test_a_banned_expert_is_chosen_no_more_until_it_is_allowed_again(works):
    def shares() -> list[int]:
        works.traffic.step(works.engine)
        works.window.trace()
        return works.window.trace().expert_counts()[2].tolist()

    control = works.engine.control
    before = control.policy
    assert works.ask("ban", expert=5, layer=2) == {"banned": [[2, 5]]}
    works.until(lambda: (shares(), works.telemetry.latest.meta["facts"].get("banned"))[1])
    assert works.telemetry.latest.meta["facts"]["banned"] == [[2, 5]]
    chosen = shares()[5]
    for _ in range(10):
        assert shares()[5] == chosen, "expert 5 of layer 2 was chosen although it is banned"
    assert len(works.ask("ban", expert=0)["banned"]) == 1 + 4
    assert works.ask("allow", expert=0, layer=1)["banned"] == [[0, 0], [2, 0], [2, 5], [3, 0]]
    assert works.ask("allow", expert=0) == {"banned": [[2, 5]]}
    assert works.ask("allow", expert=7) == {"banned": [[2, 5]]}
    works.ask("ban", expert=1)
    assert works.ask("allow") == {"banned": []} and control.policy == before
    works.until(lambda: shares()[5] > chosen)
    for action, detail, words in [
        ("ban", {}, "needs an expert"),
        ("ban", {"expert": 8}, "expert"),
        ("ban", {"expert": 0, "layer": 4}, r"layer \(4\) must be one of 0, 1, 2, 3"),
        ("ban", {"expert": "0"}, "of the kind int"),
        ("allow", {"all": 1}, "unknown detail 'all'"),
    ]:
        with pytest.raises(WorkbenchError, match=words):
            works.ask(action, **detail)
    for expert in range(6):
        works.ask("ban", expert=expert)
    with pytest.raises(WorkbenchError, match="Ban fewer"):
        works.ask("ban", expert=6)
    assert control.policy.banned == {(layer, e) for layer in range(4) for e in range(6)}
