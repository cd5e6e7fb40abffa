"""Capacity in a running engine: what is dropped is counted, told and defined; off, nothing is."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from engine import EngineConfig, SamplingParams
from engine.errors import ConfigError, RoutingError
from engine.events import ControlEvent, StepEvent
from engine.routing.capacity import LEAST_ROWS, rows_allowed
from tests.runtime.conftest import DRAFT, MODEL, Listener
from workbench.trace import Recorder, load, save

PROMPT = "Le serveur de messagerie est " * 3
NOTHING = SamplingParams(max_tokens=0)


def prefilled(make_engine, factor=None, listener=None, **options):
    listener = listener or Listener()
    engine = make_engine(listener, capacity_factor=factor, num_devices=2, **options)
    engine.add(PROMPT, NOTHING, watch=range(3))
    engine.step()
    return engine, listener.of(StepEvent)[0]


def test_each_expert_takes_what_it_may_and_the_rest_is_told_everywhere(make_engine):
    engine, step = prefilled(make_engine, 1.2)
    allowed = rows_allowed(1.2, step.num_rows, 2, 8)
    dropped_TLK = step.phy_ids < 0
    for layer in range(4):
        taken = np.bincount(step.phy_ids[:, layer][~dropped_TLK[:, layer]], minlength=8)
        wanted = np.bincount(step.topk_ids[:, layer].ravel(), minlength=8)
        assert taken.tolist() == np.minimum(wanted, allowed).tolist()
        for expert in np.flatnonzero(wanted > allowed):
            hot = step.topk_ids[:, layer] == expert
            weights = step.topk_weights[:, layer]
            assert weights[hot & dropped_TLK[:, layer]].max() <= (
                weights[hot & ~dropped_TLK[:, layer]].min()
            )
    lost = dropped_TLK.sum((0, 2)).tolist()
    assert sum(lost) > 0 and list(step.dropped) == lost
    assert list(engine.stats().dropped_slots) == lost
    for decision in step.decisions:
        assert decision.capacity == allowed
        for physical, device, reason in zip(
            decision.physical, decision.devices, decision.reasons, strict=True
        ):
            assert (physical < 0) == (device < 0) == reason.startswith("dropped: ")


def test_the_first_layers_choice_stays_bitwise_and_only_dropped_slots_are_missing(make_engine):
    """What may change: rows with a dropped slot, and later layers, which read their output."""
    _, plain = prefilled(make_engine)
    _, step = prefilled(make_engine, 1.2)
    for name in ("topk_ids", "topk_weights", "margins"):
        assert (getattr(plain, name)[:, 0] == getattr(step, name)[:, 0]).all(), name
    for name in ("positions", "token_ids", "homes", "request_ids", "causes"):
        assert (getattr(plain, name) == getattr(step, name)).all(), name
    kept = step.phy_ids[:, 0] >= 0
    assert (plain.phy_ids[:, 0][kept] == step.phy_ids[:, 0][kept]).all()
    untouched = kept.all(axis=1)
    assert 0 < untouched.sum() < len(untouched)
    assert (plain.phy_ids >= 0).all() and plain.dropped == ()


def test_a_step_in_which_nobody_asks_too_much_is_bitwise_the_same(make_engine):
    plain = make_engine(hash_logits=True)
    limited = make_engine(hash_logits=True, capacity_factor=1.0)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    assert LEAST_ROWS >= 3, "three tokens cannot ask an expert for more"
    (one,), (other,) = (engine.generate([[5, 6, 7]], params) for engine in (plain, limited))
    assert one.logits_sha256 == other.logits_sha256
    assert sum(limited.stats().dropped_slots) == 0


def test_operators_set_it_and_the_drill_tightens_it(make_engine):
    listener = Listener()
    engine, _ = prefilled(make_engine, listener=listener)
    engine.control.set_capacity(1.5)
    (said,) = listener.of(ControlEvent)
    assert (said.action, said.detail) == ("set_capacity", {"factor": 1.5})
    assert engine.control.state()["capacity_factor"] == 1.5
    engine.generate([PROMPT], NOTHING)
    before = sum(engine.stats().dropped_slots)
    engine.control.inject("gate.capacity", partial(min, 2), lease_s=60)
    engine.generate([PROMPT], NOTHING)
    step = listener.of(StepEvent)[-1]
    taken = np.bincount(step.phy_ids[:, 0][step.phy_ids[:, 0] >= 0])
    assert taken.max() == 2 and sum(engine.stats().dropped_slots) > before
    engine.control.clear("gate.capacity")
    engine.control.clear_policy()
    engine.generate([PROMPT], NOTHING)
    assert listener.of(StepEvent)[-1].dropped == ()


def test_dropped_slots_survive_a_file(make_engine, tmp_path):
    recorder = Recorder()
    _, step = prefilled(make_engine, 1.2, listener=Both(recorder))
    trace = load(save(recorder.trace(), tmp_path / "dropped.moetrace"))
    assert trace.step_event(0).dropped == step.dropped
    assert trace.decisions[0].capacity == step.decisions[0].capacity > 0


class Both(Listener):
    def __init__(self, recorder):
        super().__init__()
        self.recorder = recorder

    def emit(self, event):
        super().emit(event)
        self.recorder.emit(event)


def test_deterministic_mode_refuses_it_because_a_drop_depends_on_the_batch(make_engine):
    with pytest.raises(ConfigError, match=r"capacity_factor \(1.5\).*other rows of the step"):
        EngineConfig(model=MODEL, capacity_factor=1.5, deterministic=True)
    engine = make_engine(deterministic=True, num_threads=None)
    with pytest.raises(RoutingError, match="deterministic mode"):
        engine.control.set_capacity(1.5)
    with pytest.raises(RoutingError, match="deterministic mode"):
        engine.control.set_policy(engine.control.policy.limited(1.5))
    assert engine.control.policy.is_empty


def test_a_drop_does_depend_on_the_batch(make_engine, prompts):
    engine = make_engine(hash_logits=True, capacity_factor=1.0)
    params = SamplingParams(max_tokens=1)
    alone = engine.generate([PROMPT], params)[0].logits_sha256
    crowd = engine.generate([PROMPT, *[PROMPT] * 3], params)[0].logits_sha256
    assert alone != crowd


@pytest.mark.parametrize("factor", [0.5, 17, "1.5", True, float("nan")])
def test_a_factor_that_makes_no_sense_is_refused(factor):
    with pytest.raises(ConfigError, match="capacity_factor"):
        EngineConfig(model=MODEL, capacity_factor=factor)


def test_a_dense_model_refuses_it():
    from engine import Engine

    with pytest.raises(ConfigError, match="no experts"):
        Engine(EngineConfig(model=DRAFT, capacity_factor=1.5, num_blocks=16))
