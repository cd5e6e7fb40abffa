"""Each mechanism changes what it is for, named here; all else a step tells stays, to the bit.

Number formats by unit and capacity are refused in deterministic mode, where every run is held to
another; what they may change is in `test_precision_routing` and `test_capacity`.
"""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest

from engine import SamplingParams
from engine.events import StepEvent
from engine.routing.balance import replicated
from tests.runtime.conftest import DRAFT, Listener

EXACT = {"deterministic": True, "hash_logits": True, "num_threads": None, "num_devices": 4}
DRAFTING = {"draft": DRAFT, "draft_length": "fixed", "draft_tokens": 3}
PROMPT = "12 * 7 = 84\n13 * 7 = "
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=2)
LAYERS = range(4)
TIMES = {"request_id", "stage_ms"}
"""What no two runs have in common."""
CHOICE = {
    *("scores", "topk_ids", "topk_weights", "runner_up", "margin"),
    *("physical", "devices", "reasons"),
    *("row.topk_ids", "row.topk_weights", "row.margins", "row.phy_ids"),
}
"""What follows from another choice of experts in the same layer: not the gate's logits."""


def told(make_engine, arrange=lambda engine: None, **options):
    """Run one request; returns its result, and by place (position, layer) all that was decided."""
    listener = Listener()
    engine = make_engine(listener, **EXACT | options)
    arrange(engine)
    length = len(engine.tokenizer.encode(PROMPT)) + PARAMS.max_tokens - 1
    request = engine.add(PROMPT, PARAMS, watch=range(length))
    (done,) = engine.finish([request])
    places = {}
    for step in listener.of(StepEvent):
        for decision in step.decisions:
            if decision.verdict != "rejected":
                fields = asdict(decision)
                places[decision.position, decision.layer] = fields
        for row in np.flatnonzero(step.causes == 0).tolist():
            for layer in LAYERS:
                of_row = {
                    name: getattr(step, name)[row, layer]
                    for name in ("topk_ids", "phy_ids", "topk_weights", "margins")
                }
                places[int(step.positions[row]), layer].update(
                    {f"row.{name}": value for name, value in of_row.items()}
                )
    assert len(places) == length * len(LAYERS)
    result = (done.token_ids, done.text, done.finish_reason, done.logprobs, done.logits_sha256)
    return result, places


def differing(one, other, places=None):
    """The names of what differs anywhere among `places`."""
    return {
        name
        for place in (one if places is None else places)
        for name, value in one[place].items()
        if name not in TIMES and not np.array_equal(value, other[place][name])
    }


@pytest.fixture(scope="module")
def make():
    from engine import Engine, EngineConfig
    from tests.runtime.conftest import MODEL

    def made(listener=None, **options):
        return Engine(EngineConfig(model=MODEL, num_blocks=64, **options), sink=listener)

    return made


@pytest.fixture(scope="module")
def plain(make):
    return told(make)


def test_a_second_run_differs_in_nothing_but_times(make, plain):
    result, places = told(make)
    assert result == plain[0] and differing(plain[1], places) == set()


def test_look_ups_change_what_was_looked_up_and_nothing_else(make, plain):
    result, places = told(make, lambda engine: engine.look_up(0))
    assert result == plain[0] and differing(plain[1], places) == {"looked_up"}


def test_replicas_change_which_copy_runs_and_where_and_nothing_else(make, plain):
    def copied(engine):
        load_LE = np.tile(np.arange(8, 0, -1), (4, 1))
        engine.control.publish_table(replicated(load_LE, 4, version=1))

    result, places = told(make, copied)
    may = {"physical", "row.phy_ids", "devices", "reasons", "table_version", "looked_up"}
    found = differing(plain[1], places)
    assert result == plain[0] and {"physical", "reasons", "table_version"} <= found <= may


def test_a_draft_changes_who_proposed_and_nothing_else(make, plain):
    result, places = told(make, **DRAFTING)
    found = differing(plain[1], places)
    assert result == plain[0]
    assert {"model", "verdict"} <= found <= {"model", "verdict", "looked_up"}


def test_smoothing_changes_choices_and_no_logit_that_no_choice_stands_before(make, plain):
    def smooth(engine):
        engine.control.set_smoothing(0.5)

    _, places = told(make, smooth)
    length = len({position for position, _ in places}) - PARAMS.max_tokens + 1
    first_token = [(0, layer) for layer in LAYERS]
    first_layer = [(position, 0) for position in range(length)]
    assert differing(plain[1], places, first_token) == set(), "nothing was used before"
    found = differing(plain[1], places, first_layer)
    assert {"smoothing", "scores", "topk_ids"} <= found <= CHOICE | {"smoothing"}
    for place in first_layer:
        mine = places[place]
        used_E = mine["smoothing"] > 0
        assert set(np.unique(mine["smoothing"])) <= {0.0, 0.5}
        assert used_E.sum() == (2 if place[0] else 0), "what the token before used"
        if place[0]:
            assert set(np.flatnonzero(used_E)) == set(places[place[0] - 1, 0]["topk_ids"].tolist())


def test_what_if_changes_its_layer_and_those_behind_it_alone(make, plain):
    banned = int(plain[1][3, 2]["topk_ids"][0])
    _, places = told(make, lambda engine: engine.control.ban_expert(2, banned))
    prompt = {position for position, _ in places if position < len(places) // 4 - 7}
    before = [(position, layer) for position in prompt for layer in (0, 1)]
    assert differing(plain[1], places, before) == set()
    there = [(position, 2) for position in prompt]
    found = differing(plain[1], places, there)
    assert {"scores", "topk_ids"} <= found <= CHOICE
    kept = [place for place in there if banned not in plain[1][place]["topk_ids"]]
    assert differing(plain[1], places, kept) <= {"scores", "runner_up", "margin", "row.margins"}
    assert "logits" in differing(plain[1], places, [(position, 3) for position in prompt])
