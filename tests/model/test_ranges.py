"""NVTX ranges: balanced, named like the stages, and absent where there is no CUDA."""

from __future__ import annotations

import pytest

from engine import Engine, EngineConfig, SamplingParams
from engine.events import STAGES
from engine.model.ranges import annotate, give_ranges


class Pushed:
    def __init__(self):
        self.open, self.seen = [], []

    def range_push(self, msg):
        self.open.append(msg)
        self.seen.append(tuple(self.open))

    def range_pop(self):
        self.open.pop()


@pytest.fixture
def engine():
    engine = Engine(EngineConfig(model="data/models/polyglot-moe", num_blocks=16, num_threads=1))
    yield engine
    engine.close()


def test_every_stage_of_a_step_is_a_range_of_its_name(engine):
    pushed = Pushed()
    plain = engine.generate(["a b"], SamplingParams(max_tokens=2))[0].token_ids
    rank = engine._runner.rank
    assert annotate(rank.model, pushed)
    own = [("sample", rank, "sample"), ("schedule", engine._scheduler, "schedule"),
           ("postprocess", engine._outbox, "take")]  # fmt: skip
    assert give_ranges(own, pushed) == 3
    assert engine.generate(["a b"], SamplingParams(max_tokens=2))[0].token_ids == plain
    names = [stack[-1] for stack in pushed.seen]
    assert not pushed.open and set(names) <= set(STAGES)
    layers, steps = 4, 2
    for stage in ("attention", "gate", "select", "place", "sort", "dispatch", "experts", "combine"):
        assert names.count(stage) == layers * steps, stage
    for stage in ("head", "embed", "sample", "schedule", "postprocess"):
        assert names.count(stage) == steps, stage


def test_a_range_is_closed_when_its_stage_fails(engine):
    pushed = Pushed()
    model = engine._runner.rank.model
    annotate(model, pushed)
    with pytest.raises(AttributeError):
        model.layers[0].moe.gate.logits(None)
    assert pushed.seen and not pushed.open


def test_without_cuda_nothing_is_wrapped(engine, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    model = engine._runner.rank.model
    assert annotate(model) == 0 and "sample" not in vars(engine._runner.rank)
    assert "logits" not in vars(model.layers[0].moe.gate)
