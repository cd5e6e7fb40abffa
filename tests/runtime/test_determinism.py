"""Deterministic mode: bitwise equal logits, proven by hash, whatever else goes on.

Text that is equal proves nothing; every comparison is of the SHA-256 over fp32 logits.
"""

from __future__ import annotations

import hashlib

import pytest

from engine import SamplingParams
from engine.faults import Faults
from tests.runtime.conftest import Listener

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


def hashes(engine, prompts, params=PARAMS):
    return [done.logits_sha256 for done in engine.generate(prompts, params)]


def batch_of(prompts, size):
    return [prompts[i % len(prompts)] + "x" * (i // len(prompts)) for i in range(size)]


@pytest.fixture(scope="module")
def alone():
    from tests.runtime.conftest import PROMPTS, _engine

    engine = _engine(deterministic=True, hash_logits=True)
    return [hashes(engine, [prompt])[0] for prompt in PROMPTS]


def test_different_prompts_have_different_hashes(alone):
    assert len(set(alone)) == len(alone)


@pytest.mark.parametrize("size", [1, 2, 4, 12, 40])
def test_a_prompt_has_the_same_logits_in_every_batch(shared_engine, prompts, alone, size):
    engine = shared_engine(deterministic=True, hash_logits=True)
    known = min(size, len(prompts))
    assert hashes(engine, batch_of(prompts, size))[:known] == alone[:known]


def test_the_order_of_a_batch_changes_nothing(shared_engine, prompts, alone):
    engine = shared_engine(deterministic=True, hash_logits=True)
    assert hashes(engine, prompts[::-1]) == alone[::-1]


@pytest.mark.parametrize("max_step_tokens", [3, 16, 61])
def test_prefill_in_other_chunks_changes_nothing(make_engine, prompts, alone, max_step_tokens):
    engine = make_engine(
        deterministic=True, hash_logits=True, max_step_tokens=max_step_tokens, num_threads=None
    )
    assert hashes(engine, prompts) == alone


def test_logical_devices_and_tracing_change_nothing(make_engine, prompts, alone):
    listener = Listener()
    engine = make_engine(
        listener, deterministic=True, hash_logits=True, num_devices=8, num_threads=None
    )
    assert hashes(engine, prompts) == alone
    assert listener.events


def test_decoding_gives_the_logits_that_prefilling_the_same_text_gives(shared_engine, prompts):
    engine = shared_engine(deterministic=True, hash_logits=True)
    for prompt in prompts:
        done = engine.generate([prompt], PARAMS)[0]
        rows = engine.logits([*done.prompt_token_ids, *done.token_ids])
        first = len(done.prompt_token_ids) - 1
        prefilled = rows[first : first + len(done.token_ids)]
        assert hashlib.sha256(prefilled.tobytes()).hexdigest() == done.logits_sha256


def test_preemption_changes_nothing(make_engine, prompts, alone):
    engine = make_engine(
        deterministic=True, hash_logits=True, block_size=4, num_blocks=18, num_threads=None
    )
    done = engine.generate(prompts, PARAMS)
    assert [one.logits_sha256 for one in done] == alone
    assert sum(one.extra_rows.get("preemption", 0) for one in done) > 0


def test_a_fault_that_healed_leaves_no_trace(make_engine, prompts, alone):
    faults = Faults()
    engine = make_engine(None, faults, deterministic=True, hash_logits=True, num_threads=None)
    faults.set("experts.compute", lambda rows: rows * float("nan"))
    broken = hashes(engine, prompts)
    faults.clear("experts.compute")
    assert hashes(engine, prompts) == alone
    assert not set(broken) & set(alone)


def test_the_check_fails_without_deterministic_mode(shared_engine, prompts):
    engine = shared_engine(hash_logits=True)
    by_itself = [hashes(engine, [prompt])[0] for prompt in prompts]
    assert hashes(engine, batch_of(prompts, 40))[: len(prompts)] != by_itself
