"""Smoothing in a running engine: off it changes no bit, on it depends on the sequence alone."""

from __future__ import annotations

import numpy as np
import pytest

from engine import SamplingParams
from engine.errors import RoutingError
from engine.events import ControlEvent, StepEvent
from tests.runtime.conftest import Listener

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
BONUS = 1.5


def hashes(engine, prompts):
    return [done.logits_sha256 for done in engine.generate(prompts, PARAMS)]


def smoothed(make_engine, **options):
    engine = make_engine(deterministic=True, hash_logits=True, num_threads=None, **options)
    engine.control.set_smoothing(BONUS)
    return engine


def test_a_bonus_of_zero_changes_no_bit_and_one_above_does(make_engine, prompts):
    engine = make_engine(hash_logits=True)
    before = hashes(engine, prompts[:3])
    engine.control.set_smoothing(0)
    assert hashes(engine, prompts[:3]) == before
    engine.control.set_smoothing(BONUS)
    assert hashes(engine, prompts[:3]) != before
    engine.control.clear_policy()
    assert hashes(engine, prompts[:3]) == before


def test_smoothed_logits_depend_on_the_sequence_alone(make_engine, prompts):
    prompts = prompts[:4]
    engine = smoothed(make_engine)
    together = hashes(engine, prompts)
    assert [hashes(engine, [prompt])[0] for prompt in prompts] == together
    assert hashes(smoothed(make_engine, max_step_tokens=3), prompts) == together
    listener = Listener()
    tight = smoothed(make_engine, num_blocks=4, listener=listener)
    assert hashes(tight, prompts) == together


def test_a_window_and_its_decay_depend_on_the_sequence_alone_too(make_engine, prompts):
    def under(**options):
        engine = make_engine(deterministic=True, hash_logits=True, num_threads=None, **options)
        engine.control.set_smoothing(BONUS, 5, 0.6)
        return engine

    together = hashes(under(), prompts[:3])
    assert hashes(under(max_step_tokens=3), prompts[:3]) == together
    assert hashes(under(num_blocks=4), prompts[:3]) == together
    assert hashes(smoothed(make_engine), prompts[:3]) != together, "a window of one is another"


def test_logits_of_all_positions_lean_as_a_running_sequence_does(make_engine):
    listener = Listener()
    engine = make_engine(listener, max_step_tokens=4, deterministic=True, num_threads=None)
    engine.control.set_smoothing(BONUS, 3, 0.5)
    ids = engine.tokenizer.encode("Der Server ist nicht erreichbar")
    (done,) = engine.generate([ids], SamplingParams(max_tokens=1, logprobs=1, ignore_eos=True))
    whole = engine.logits(ids)
    assert len(ids) > 4, "the prompt runs in several chunks"
    assert int(whole[-1].argmax()) == done.token_ids[0]
    last = whole[-1].astype("float64")
    logprob = last[done.token_ids[0]] - np.log(np.exp(last - last.max()).sum()) - last.max()
    assert done.logprobs[0].logprob == pytest.approx(logprob, abs=1e-5)


def test_a_sequence_started_before_smoothing_goes_on_under_it(make_engine):
    engine = make_engine()
    engine.add("Der Server ist", SamplingParams(max_tokens=8, ignore_eos=True))
    engine.step()
    engine.control.set_smoothing(BONUS)
    while engine.has_work:
        engine.step()


def test_smoothing_keeps_tokens_on_their_experts(make_engine, prompts):
    def kept(bonus):
        listener = Listener()
        engine = make_engine(listener)
        engine.control.set_smoothing(bonus)
        engine.generate(prompts[:1], SamplingParams(max_tokens=24, ignore_eos=True))
        ids = [set(row) for step in listener.of(StepEvent) for row in step.topk_ids[:, 0].tolist()]
        return sum(a == b for a, b in zip(ids, ids[1:], strict=False))

    assert kept(0) < kept(3.0) <= kept(100.0)


def test_smoothing_is_an_event_and_part_of_the_state(make_engine):
    listener = Listener()
    engine = make_engine(listener)
    engine.control.set_smoothing(0.5)
    (said,) = listener.of(ControlEvent)
    told = {"bonus": 0.5, "window": 1, "decay": 1.0}
    assert (said.action, said.detail) == ("set_smoothing", told)
    assert engine.control.state()["smoothing"] == 0.5 and not engine.control.policy.is_empty
    for bonus in (-1, float("nan"), 101):
        with pytest.raises(RoutingError, match="bonus"):
            engine.control.set_smoothing(bonus)
    assert engine.control.state()["smoothing"] == 0.5


def test_the_hash_of_the_weights_tells_one_changed_bit(make_engine):
    engine = make_engine()
    before = engine.weights_sha256()
    engine.generate(["Der"], PARAMS)
    assert engine.weights_sha256() == before
    weight = engine._runner.rank.model.norm.weight
    weight.data[0] += 1e-6
    assert engine.weights_sha256() != before
