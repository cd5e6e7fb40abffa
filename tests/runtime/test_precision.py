"""Experts in int8: near the model's own numbers, said in the record, refused elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from engine import Engine, EngineConfig, SamplingParams
from engine.errors import ConfigError
from engine.events import StepEvent
from tests.runtime.conftest import DRAFT, MODEL, PROMPTS, Listener

WAYS = [("float32", "int8"), ("bfloat16", "model"), ("bfloat16", "int8")]


def engine_in(dtype, precision, sink=None):
    config = EngineConfig(model=MODEL, num_blocks=64, dtype=dtype, precision=precision, seed=1)
    return Engine(config, sink=sink)


def log_softmax(logits):
    logits = logits.astype(np.float64)
    return (
        logits
        - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
        - (logits.max(-1, keepdims=True))
    )


def divergence(exact, other):
    """Mean over positions of the KL divergence from `exact`, in nats."""
    p, q = log_softmax(exact), log_softmax(other)
    return float((np.exp(p) * (p - q)).sum(-1).mean())


@pytest.mark.parametrize(("dtype", "precision"), WAYS)
def test_fewer_bits_change_the_distribution_little(dtype, precision):
    exact, other = engine_in("float32", "model"), engine_in(dtype, precision)
    found = [divergence(exact.logits(text), other.logits(text)) for text in PROMPTS]
    assert 0 < np.mean(found) < 0.01
    wrong = [divergence(exact.logits(text), other.logits(text)[::-1]) for text in PROMPTS]
    assert np.mean(wrong) > 0.5, "positions in another order are far away"


def test_what_ran_stands_in_the_record_and_in_the_config():
    listener = Listener()
    engine = engine_in("bfloat16", "int8", listener)
    engine.finish([engine.add(PROMPTS[0], SamplingParams(max_tokens=3), watch=[0, 1])])
    decisions = [d for event in listener.of(StepEvent) for d in event.decisions]
    assert decisions and {decision.format for decision in decisions} == {"int8"}
    assert "W8A8" in engine.config.scheme and "bfloat16" in engine.config.scheme
    taken = {choice.op: choice.name for choice in engine.ops.reasons}
    assert taken["grouped_mlp"] == "int8"


def test_int8_is_refused_where_it_cannot_be():
    with pytest.raises(ConfigError, match="must be model in deterministic mode"):
        EngineConfig(model=MODEL, precision="int8", deterministic=True)
    with pytest.raises(ConfigError, match=r"precision \(int4\) must be one of model, int8"):
        EngineConfig(model=MODEL, precision="int4")
    with pytest.raises(ConfigError, match="has no experts"):
        Engine(EngineConfig(model=DRAFT, precision="int8"))


def test_weights_hash_alike_whatever_was_made_from_them():
    plain = Engine(EngineConfig(model=MODEL, num_blocks=64, deterministic=True))
    assert engine_in("float32", "model").weights_sha256() == plain.weights_sha256()
    assert engine_in("float32", "int8").weights_sha256() == plain.weights_sha256()
    assert engine_in("bfloat16", "model").weights_sha256() != plain.weights_sha256()
