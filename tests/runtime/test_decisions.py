"""The whole record of a decision is what the step compared, checked by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors import safe_open

from engine import SamplingParams
from engine.config import ModelConfig
from engine.errors import RequestError
from engine.events import StartEvent, StepEvent
from engine.kernels.router import RouterConfig
from engine.kernels.topk import route
from tests.runtime.conftest import DRAFT, MODEL, Listener


@pytest.fixture
def recorded(make_engine):
    listener = Listener()
    engine = make_engine(listener, num_devices=4)
    inputs = []
    for layer in engine._runner.rank.model.layers:
        layer.moe.register_forward_pre_hook(lambda _, args: inputs.append(args[0].clone()))
    engine.add("Der Server ist", SamplingParams(max_tokens=3, ignore_eos=True), watch=(2, 5))
    while engine.has_work:
        engine.step()
    decisions = [d for step in listener.of(StepEvent) for d in step.decisions]
    return listener.of(StepEvent), decisions, inputs


def test_watched_tokens_are_recorded_once_in_every_layer(recorded):
    _, decisions, _ = recorded
    assert sorted((d.position, d.layer) for d in decisions) == [
        (position, layer) for position in (2, 5) for layer in range(4)
    ]


def test_a_decision_recomputed_by_hand_from_the_weights_is_the_same(recorded):
    _, decisions, inputs = recorded
    with safe_open(MODEL / "model.safetensors", "pt") as weights:
        for decision in [d for d in decisions if d.position == 2]:
            gate = weights.get_tensor(f"model.layers.{decision.layer}.mlp.gate.weight").double()
            logits = (gate @ inputs[decision.layer][2].double()).numpy()
            assert decision.logits == pytest.approx(logits, rel=1e-4, abs=1e-5)
            scores = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
            assert decision.scores == pytest.approx(scores, rel=1e-4, abs=1e-6)
            order = np.argsort(-scores)
            assert decision.topk_ids.tolist() == order[:2].tolist()
            assert decision.runner_up == order[2]
            assert decision.margin == pytest.approx(scores[order[1]] - scores[order[2]], abs=1e-6)
            kept = scores[order[:2]]
            assert decision.topk_weights == pytest.approx(kept / kept.sum(), rel=1e-4)
            assert not np.allclose(decision.topk_weights, kept)


def test_a_decision_agrees_with_the_compact_record_of_its_row(recorded):
    steps, decisions, _ = recorded
    rows = {
        int(position): (step, row) for step in steps for row, position in enumerate(step.positions)
    }
    for decision in decisions:
        step, row = rows[decision.position]
        assert decision.token_id == step.token_ids[row]
        assert (decision.topk_ids == step.topk_ids[row, decision.layer]).all()
        assert (decision.physical == step.phy_ids[row, decision.layer]).all()
        assert (decision.topk_weights == step.topk_weights[row, decision.layer]).all()
        assert decision.margin == step.margins[row, decision.layer]
        assert (decision.devices == decision.physical // 2).all()


def test_what_else_bore_on_the_choice_makes_up_the_scores(make_engine):
    listener = Listener()
    engine = make_engine(listener, num_devices=2)
    engine.control.set_bias(None, 3, 1.5)
    engine.control.ban_expert(1, 6)
    engine.control.set_smoothing(0.8, 3, 0.5)
    engine.add("Der Server ist nicht", SamplingParams(max_tokens=0), watch=range(5))
    engine.step()
    (step,) = listener.of(StepEvent)
    assert len(step.decisions) == 5 * 4
    bonuses = set()
    for d in step.decisions:
        assert d.bias.tolist() == [0, 0, 0, 1.5, 0, 0, 0, 0]
        bonuses |= set(np.round(d.smoothing.astype(float), 6).tolist())
        logits = torch.from_numpy(d.logits + d.bias + d.smoothing)
        if d.layer == 1:
            logits[6] = -torch.inf
        assert d.scores == pytest.approx(torch.softmax(logits, -1).numpy(), abs=1e-6)
        assert not d.shut.any() and d.capacity == d.unit == -1
        assert (d.model, d.verdict) == ("target", "")
        assert {"gate", "select", "place", "sort", "dispatch", "experts"} <= set(d.stage_ms)
    assert bonuses == {0.0, 0.8, 0.4, 0.2}
    for stage in ("gate", "select", "place", "sort", "experts", "combine"):
        layers = {d.layer: d.stage_ms[stage] for d in step.decisions}
        assert sum(layers.values()) == pytest.approx(step.stage_ms[stage], rel=1e-3), stage


def test_the_groups_that_are_shut_are_recorded_as_they_were_compared():
    router = RouterConfig.deepseek_v3(2, num_groups=4, keep=1)
    logits = torch.tensor([[0, 0, 2.2, 1.4, 0, 0, 0, 0], [3.0, 2, 0, 0, 0, 0, 0, 0]])
    chosen = route(logits, router, selection_bias_E=torch.full((8,), -2.0))
    assert chosen.shut_TE.tolist() == [
        [True, True, False, False, True, True, True, True],
        [False, False, True, True, True, True, True, True],
    ]
    for row, ids in enumerate(chosen.topk_ids_TK.tolist()):
        assert not chosen.shut_TE[row][ids].any()
    assert route(logits, RouterConfig.softmax(2, renormalise=True)).shut_TE is None


def test_a_proposed_token_has_its_verdict_and_the_others_none(make_engine):
    listener = Listener()
    engine = make_engine(listener, draft=DRAFT, draft_length="fixed", draft_tokens=3)
    prompt = engine.tokenizer.encode("12 * 7 = ")
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    request = engine.add(prompt, params, watch=range(len(prompt) + 20))
    (done,) = engine.finish([request])
    verdicts = {"": 0, "accepted": 0, "rejected": 0}
    for step in listener.of(StepEvent):
        rejected = {int(p) for p, c in zip(step.positions, step.causes, strict=True) if c == 3}
        for d in step.decisions:
            if d.layer == 0:
                verdicts[d.verdict] += 1
                assert (d.verdict == "") == (d.model == "target")
                assert (d.verdict == "rejected") == (d.position in rejected)
    assert verdicts["accepted"] == done.draft.accepted > 0
    assert verdicts["rejected"] == done.extra_rows["rejected_draft"] > 0
    assert verdicts[""] + verdicts["accepted"] == done.rows


def test_sources_point_at_lines_that_exist(recorded):
    _, decisions, _ = recorded
    root = MODEL.parents[2]
    for place in decisions[0].source:
        path, line = place.split(":")
        text = (root / path).read_text().splitlines()[int(line) - 1]
        assert text.lstrip().startswith(("def ", "@"))


def test_a_watched_token_outside_the_request_is_refused(make_engine):
    engine = make_engine()
    with pytest.raises(RequestError, match="watched token"):
        engine.add([5, 6], SamplingParams(max_tokens=1), watch=(3,))
    with pytest.raises(RequestError, match="watched token"):
        engine.add([5, 6], SamplingParams(max_tokens=1), watch=(-1,))


def test_recording_is_a_copy_that_later_steps_do_not_change(make_engine):
    listener = Listener()
    engine = make_engine(listener)
    engine.generate(["Der Server"], SamplingParams(max_tokens=1, ignore_eos=True))
    first = listener.of(StepEvent)[0]
    kept = (first.topk_ids.copy(), first.topk_weights.copy(), first.positions.copy())
    engine.generate(["Le serveur de"], SamplingParams(max_tokens=8, ignore_eos=True))
    assert (first.topk_ids == kept[0]).all() and (first.topk_weights == kept[1]).all()
    assert (first.positions == kept[2]).all() and not torch.is_tensor(first.positions)


def test_layers_are_named_by_the_models_own_numbers(make_engine, monkeypatch):
    numbers = (3, 4, 6, 9)  # as if dense layers stood between
    monkeypatch.setattr(ModelConfig, "moe_layers", property(lambda config: numbers))
    listener = Listener()
    engine = make_engine(listener)
    engine.add("Der", SamplingParams(max_tokens=0), watch=(1,))
    engine.step()
    (start,), (step,) = listener.of(StartEvent), listener.of(StepEvent)
    assert start.moe_layers == tuple(decision.layer for decision in step.decisions) == numbers
    for place, decision in enumerate(step.decisions):
        assert (decision.topk_ids == step.topk_ids[1, place]).all()
