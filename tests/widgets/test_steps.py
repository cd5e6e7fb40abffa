"""The stepper's state: every number is the trace's own, and nothing is invented."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from engine.errors import TraceError
from engine.events import RequestEvent, no_formats
from tests.widgets.examples import long_request
from workbench.trace import Trace
from workbench.trace.synthetic import decision, start_event, step_event
from workbench.widgets import request_ids, state_json, stepper_state, token_spec, token_weights
from workbench.widgets.steps import _full

FULL = 2
"""The token of `long_request` with a full record, in every layer."""


@pytest.fixture(scope="module")
def trace() -> Trace:
    return long_request()


def test_every_number_is_the_traces_own(trace):
    state = stepper_state(trace, 0)
    columns = trace.columns
    assert [token["position"] for token in state["tokens"]] == list(range(12))
    for row, token in enumerate(state["tokens"]):
        assert token["id"] == columns["rows/token_ids"][row]
        for layer, record in enumerate(token["layers"]):
            assert record["topk_ids"] == columns["rows/topk_ids"][row, layer].tolist()
            assert record["physical"] == columns["rows/phy_ids"][row, layer].tolist()
            weights = columns["rows/topk_weights"][row, layer]
            assert np.array_equal(np.float32(record["topk_weights"]), weights)
            where = [trace.start.rank_of_phy[phy] for phy in record["physical"]]
            assert record["devices"] == where


def test_a_watched_token_has_the_whole_decision_in_each_layer(trace):
    token = stepper_state(trace, 0)["tokens"][FULL]
    recorded = [d for d in trace.decisions if d.position == FULL]
    assert len(recorded) == len(token["layers"]) == 4
    for layer, (record, made) in enumerate(zip(token["layers"], recorded, strict=True)):
        assert made.layer == layer
        full = record["full"]
        assert np.array_equal(np.float32(full["logits"]), made.logits)
        assert np.array_equal(np.float32(full["scores"]), made.scores)
        assert full["runner_up"] == made.runner_up and full["format"] == made.format
        assert np.float32(record["margin"]) == np.float32(made.margin)
        assert full["reasons"] == list(made.reasons)
        assert full["source"]["gate"] == [made.source[0]]
        assert full["source"]["experts"] == list(made.source[3:5])


def test_other_tokens_have_their_compact_record_only(trace):
    tokens = stepper_state(trace, 0)["tokens"]
    compact = [token for at, token in enumerate(tokens) if at != FULL]
    assert all(record["full"] is None for token in compact for record in token["layers"])
    assert tokens[0]["layers"][0]["margin"] is not None


def test_kept_counts_the_experts_shared_with_the_token_before(trace):
    tokens = stepper_state(trace, 0)["tokens"]
    assert tokens[0]["layers"][0]["kept"] is None
    ids = trace.columns["rows/topk_ids"]
    kept = [tokens[at]["layers"][1]["kept"] for at in range(1, 12)]
    assert kept == [len({*ids[at, 1]} & {*ids[at - 1, 1]}) for at in range(1, 12)]
    assert len(set(kept)) > 1, "the example has only one case"


def test_prompt_and_generated_tokens_are_told_apart(trace):
    state = stepper_state(trace, 0)
    assert [token["generated"] for token in state["tokens"]] == [False] * 8 + [True] * 4
    assert state["request"] == {"id": 0, "label": "de", "ended": "length"}


def test_the_first_request_with_full_records_is_the_default(trace):
    assert stepper_state(trace)["request"]["id"] == 0
    assert request_ids(trace) == [0]


def test_an_unknown_request_is_refused_with_those_there_are(trace):
    with pytest.raises(TraceError, match="no rows of request 9; it has 0"):
        stepper_state(trace, 9)
    empty = Trace.from_events(start_event(), [])
    with pytest.raises(TraceError, match="holds no rows"):
        stepper_state(empty)


def test_what_is_not_finite_becomes_none_and_the_state_is_json():
    start = start_event()
    event = step_event(start, 0, 1)
    made = decision(start, request_id=0, position=0, token_id=5, rng=np.random.default_rng(0))
    made = replace(made, logits=np.full(8, np.nan, np.float32), margin=float("inf"), runner_up=-1)
    event.decisions = (made,)
    state = stepper_state(Trace.from_events(start, [(0, event)]))
    record = state["tokens"][0]["layers"][0]
    assert record["full"]["logits"] == [None] * 8 and record["margin"] is None
    assert json.loads(state_json(state)) == state


def test_a_position_that_ran_again_is_shown_once_by_the_run_that_counted():
    start = start_event()
    again = step_event(start, 0, 1, seed=1)
    again.causes = np.ones(1, np.uint8)
    counted = step_event(start, 0, 1, seed=2)
    trace = Trace.from_events(start, [(0, again), (1, counted)])
    (token,) = stepper_state(trace)["tokens"]
    assert token["runs"] == 2 and token["cause"] == "accepted"
    assert token["layers"][0]["topk_ids"] == counted.topk_ids[0, 0].tolist()


def test_devices_under_a_later_table_are_not_guessed():
    start = start_event()
    later = step_event(start, 0, 1)
    later.table_version = 2
    (token,) = stepper_state(Trace.from_events(start, [(0, later)]))["tokens"]
    assert token["layers"][0]["devices"] is None and token["table_version"] == 2


def test_a_dense_model_has_tokens_and_no_layers():
    start = replace(start_event(), moe_layers=(), num_experts=0, top_k=0, rank_of_phy=())
    event = step_event(start_event(), 0, 2)
    for name in ("topk_ids", "phy_ids", "topk_weights"):
        setattr(event, name, getattr(event, name)[:, :0, :0])
    event.margins = event.margins[:, :0]
    event.formats, event.units = no_formats(), ()
    state = stepper_state(Trace.from_events(start, [(0, event)]))
    assert state["tokens"][0]["layers"] == [] and state["engine"]["layers"] == []


def test_long_requests_are_cut_and_say_so(trace):
    state = stepper_state(trace, max_tokens=5)
    assert len(state["tokens"]) == 5 and state["note"] == "the first 5 of 12 tokens"


def test_a_map_of_tokens_by_experts(trace):
    state = stepper_state(trace)
    weights = token_weights(state, layer=3)
    assert weights.shape == (12, 8)
    np.testing.assert_allclose(weights.sum(axis=1), 1.0, rtol=1e-5)
    row = trace.columns["rows/topk_ids"][7, 3]
    assert set(np.flatnonzero(weights[7])) == set(row.tolist())
    assert token_spec(state, 3).rows[7] == "7 #" + str(state["tokens"][7]["id"])
    with pytest.raises(TraceError, match="layer \\(9\\) must be a MoE layer"):
        token_weights(state, layer=9)


def test_a_request_without_its_beginning_does_not_know_its_prompt():
    start = start_event()
    trace = Trace.from_events(start, [(0, step_event(start, 4, 1))])
    state = stepper_state(trace)
    assert state["tokens"][0]["generated"] is None and state["request"]["label"] == ""


def test_notes_of_other_requests_do_not_leak_in(trace):
    other = RequestEvent(5, "added", "fr", 0.0, prompt_token_ids=(1, 2))
    more = replace(trace, notes=((10_000, other), *trace.notes))
    assert stepper_state(more, 0)["request"]["label"] == "de"


def _rule(scores, weights, **changes):
    """Return what is said of one token whose first two experts of four were chosen."""
    start, rng = start_event(experts=4, top_k=2), np.random.default_rng(0)
    made = decision(start, request_id=0, position=0, token_id=0, rng=rng)
    logits = np.array([2.0, 1.0, 0.5, -1.0], np.float32)
    ids, nothing = np.array([0, 1], np.int16), np.zeros(4, np.float32)
    made = replace(
        made, logits=logits, scores=np.float32(scores(logits)), topk_ids=ids,
        topk_weights=np.float32(weights(np.float32(scores(logits))[:2])), bias=nothing,
        smoothing=nothing,
    )  # fmt: skip
    full = _full(replace(made, **changes))
    return full["scored"], full["weighed"]


def test_how_scores_and_weights_came_about_is_said_only_where_the_numbers_fit():
    def softmax(logits):
        return np.exp(logits) / np.exp(logits).sum()

    def sigmoid(logits):
        return 1 / (1 + np.exp(-logits))

    def shares(scores):
        return scores / scores.sum()

    assert _rule(softmax, shares) == ("softmax", "shares")
    assert _rule(sigmoid, shares) == ("sigmoid", "shares")
    assert _rule(softmax, lambda scores: scores) == ("softmax", "scores")
    assert _rule(softmax, lambda scores: 2.5 * shares(scores)) == ("softmax", "")
    assert _rule(lambda logits: logits, shares)[0] == ""
    bias = np.array([0, 0, 0, 9], np.float32)
    assert _rule(softmax, shares, bias=bias)[0] == "", "the scores are not those of these logits"
    lost = np.array([2, np.nan, 0, 0], np.float32)
    assert _rule(softmax, shares, logits=lost)[0] == ""
