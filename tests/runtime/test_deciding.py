"""Deciding is timed in every step, level by level, whoever listens; look-ups change no bit."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from engine import SamplingParams
from engine.errors import RoutingError
from engine.events import LEVELS, ROUTING_STAGES, STAGES, StepEvent
from engine.faults import Delay
from engine.routing.balance import replicated
from engine.routing.cache import MAX_ROWS
from engine.runtime.deciding import Deciding, overhead_state
from tests.runtime.conftest import Listener

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


def test_every_stage_that_decides_belongs_to_one_level_and_the_gates_product_to_none():
    of_levels = [stage for stages in LEVELS.values() for stage in stages]
    assert sorted(of_levels) == sorted(ROUTING_STAGES) and set(of_levels) <= set(STAGES)
    assert "gate" not in of_levels and "draft" not in of_levels


def test_the_sums_have_their_formula_and_the_marks_their_words():
    sums = Deciding()
    sums.add({"select": 0.3, "sort": 0.1, "gate": 5.0}, 8.0)
    sums.add({"place": 0.1, "plan": 0.2, "format": 0.1}, 2.0, [0, 3])
    told = sums.as_dict()
    assert told["level_ms"] == pytest.approx(
        {"expert": 0.3, "precision": 0.1, "model": 0.2, "device": 0.2}
    )
    assert told["overhead_share"] == pytest.approx(0.08)
    assert (told["overhead_state"], sums.dropped) == ("warning", [0, 3])
    assert [overhead_state(share) for share in (0.05, 0.051, 0.1, 0.101)] == [
        "ok",
        "warning",
        "warning",
        "alarm",
    ]


def test_the_engine_times_deciding_without_a_listener_and_as_its_events_say(make_engine):
    engine = make_engine()
    engine.generate(["Der Server"], PARAMS)
    told = engine.stats().deciding
    assert told["level_ms"]["expert"] > 0 and told["level_ms"]["device"] > 0
    assert told["level_ms"]["precision"] == told["level_ms"]["model"] == 0
    assert 0 < told["overhead_share"] < 1
    listener = Listener()
    engine = make_engine(listener)
    engine.generate(["Der Server"], PARAMS)
    steps = listener.of(StepEvent)
    told = engine.stats().deciding
    spent = sum(step.stage_ms[stage] for step in steps for stage in ROUTING_STAGES)
    assert sum(told["level_ms"].values()) == pytest.approx(spent)
    assert told["step_ms"] == pytest.approx(sum(step.duration_ms for step in steps))


def with_replicas(make_engine, listener=None, **options):
    engine = make_engine(listener, num_devices=4, **options)
    load_LE = np.tile(np.arange(8, 0, -1), (4, 1))
    engine.control.publish_table(replicated(load_LE, 4, version=1))
    return engine


def test_look_ups_change_no_bit_of_anything_that_is_told(make_engine):
    """What may change: times, and which stages were looked up. Nothing else."""
    found = []
    for max_rows in (MAX_ROWS, 0):
        listener = Listener()
        engine = with_replicas(make_engine, listener, hash_logits=True)
        engine.look_up(max_rows)
        engine.add("Der Server ist", SamplingParams(max_tokens=24, ignore_eos=True), watch=(8,))
        hashes = []
        while engine.has_work:
            hashes += [out.completion.logits_sha256 for out in engine.step() if out.completion]
        steps = listener.of(StepEvent)
        found.append((hashes, steps, engine.stats().deciding))
    (hash_on, on, with_them), (hash_off, off, without) = found
    assert hash_on == hash_off and len(on) == len(off)
    for one, other in zip(on, off, strict=True):
        for name in ("topk_ids", "phy_ids", "topk_weights", "margins", "homes", "positions"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name
    for one, other in zip(on[4].decisions, off[4].decisions, strict=True):
        assert one.reasons == other.reasons and (one.physical == other.physical).all()
    assert with_them["look_up_hits"] == sum(step.look_ups_found for step in on) > 0
    assert with_them["look_up_misses"] == sum(step.look_ups_missed for step in on) > 0
    assert without["look_up_hits"] == without["look_up_misses"] == 0
    assert not any(step.look_ups_found or step.look_ups_missed for step in off)
    assert {step.num_rows for step in on if step.look_ups_found} == {1}
    looked_up = {stage for step in on for d in step.decisions for stage in d.looked_up}
    assert looked_up <= {"place", "sort"}
    assert not any(d.looked_up for step in off for d in step.decisions)


def test_a_new_table_is_not_answered_from_the_old_one(make_engine):
    engine = with_replicas(make_engine, hash_logits=True)
    first = engine.generate(["Der Server"], PARAMS)[0]
    table = engine.table
    engine.control.publish_table(table.moved(table.rank_of_phy[::-1].copy()))
    listener = Listener()
    engine.sink = engine._announcer._sink = listener
    again = engine.generate(["Der Server"], PARAMS)[0]
    assert again.token_ids == first.token_ids
    for step in listener.of(StepEvent):
        held = np.take_along_axis(
            np.broadcast_to(table.phy2log[None], (step.num_rows, *table.phy2log.shape)),
            step.phy_ids.astype(np.int64),
            axis=2,
        )
        assert (held == step.topk_ids).all()


def test_ranks_cannot_switch_look_ups(make_engine, monkeypatch):
    engine = make_engine()
    monkeypatch.setattr(engine, "_runner", object())
    with pytest.raises(RoutingError, match="one process"):
        engine.look_up(0)
    assert engine.moe == []


class Lock:
    """A lock in the decision path that another thread holds most of the time."""

    def __init__(self):
        self.lock, self.over = threading.Lock(), False
        self.thread = threading.Thread(target=self.hold, daemon=True)
        self.thread.start()

    def hold(self):
        while not self.over:
            with self.lock:
                time.sleep(0.004)
            time.sleep(0.0005)

    def __call__(self, value):
        with self.lock:
            return value


def test_a_lock_in_the_decision_path_shows_in_the_fine_figures_alone(make_engine):
    """Total time only says "slower"; the share of `select` says where. The output is the same."""
    engine = make_engine(hash_logits=True)
    healthy = engine.generate(["Der Server"], PARAMS)[0]
    before = engine.stats().deciding
    lock = Lock()
    engine.control.inject("gate.lock", lock, lease_s=60)
    locked = engine.generate(["Der Server"], PARAMS)[0]
    engine.control.clear("gate.lock")
    lock.over = True
    lock.thread.join()
    after = engine.stats().deciding
    assert locked.logits_sha256 == healthy.logits_sha256
    spent = {level: after["level_ms"][level] - before["level_ms"][level] for level in LEVELS}
    assert spent["expert"] > 5 * before["level_ms"]["expert"]
    assert spent["expert"] > 0.3 * (after["step_ms"] - before["step_ms"])
    rest = sum(ms for level, ms in spent.items() if level != "expert")
    assert rest < 0.5 * spent["expert"]


def test_a_step_waits_for_no_lock_that_operators_hold(make_engine):
    engine = make_engine()
    held, over = threading.Event(), threading.Event()

    def operate():
        with engine.control._lock:
            held.set()
            over.wait(30)

    operator = threading.Thread(target=operate, daemon=True)
    operator.start()
    held.wait(30)
    began = time.monotonic()
    assert engine.generate(["Der"], SamplingParams(max_tokens=2))
    assert operator.is_alive() and time.monotonic() - began < 20
    over.set()
    operator.join()


def test_a_fixed_delay_at_the_lock_is_counted_as_selecting(make_engine):
    listener = Listener()
    engine = make_engine(listener)
    engine.control.inject("gate.lock", Delay(0.003), lease_s=60)
    engine.generate(["Der"], SamplingParams(max_tokens=0))
    (step,) = listener.of(StepEvent)
    assert step.stage_ms["select"] > 4 * 3.0
    assert step.stage_ms["gate"] + step.stage_ms["place"] < step.stage_ms["select"]


def test_nothing_of_training_runs_at_inference(make_engine):
    """No noise on the gate, no balancing loss: the same rows give the same bits, twice."""
    engine = make_engine()
    model = engine._runner.rank.model
    assert not any(module.training for module in model.modules())
    assert not any(isinstance(module, torch.nn.Dropout) for module in model.modules())
    gate = engine.moe[0].gate
    x_TD = torch.randn(5, engine.model_config.hidden_size)
    with torch.inference_mode():
        first, second = gate.logits(x_TD), gate.logits(x_TD)
    assert torch.equal(first, second)
    assert torch.allclose(first, x_TD @ gate.weight.T, atol=1e-5)
    assert not any(
        getattr(module, "training", False) or "noise" in name or "loss" in name
        for name, module in model.named_modules()
    )


def test_a_model_that_is_set_to_train_is_not_run(make_engine):
    from engine.cluster.rank import Rank

    engine = make_engine()
    rank = engine._runner.rank
    rank.model.train()
    with pytest.raises(AssertionError, match="set to train"):
        Rank(rank.model, engine.model_config, engine.config, engine.faults)
    rank.model.eval()
