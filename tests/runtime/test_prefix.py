"""Prefix reuse: what is shared, when, and that it changes no logit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine import SamplingParams
from engine.events import StepEvent
from engine.routing.precision import Precision
from engine.runtime.prefix import Chain, SharedBlocks
from tests.runtime.conftest import Listener

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
PROMPT = list(range(40, 90))
"""Three full blocks of 16 and two tokens."""


def filled(pool, keys):
    blocks = pool.take(len(keys))
    for block, key in zip(blocks, keys, strict=True):
        pool.share(block, key)
    return blocks


def test_a_key_depends_on_tokens_predecessor_and_conditions():
    def keys(tokens, conditions=b"a"):
        return Chain(conditions).upto(2, tokens, 4)

    one = keys([1, 2, 3, 4, 5, 6, 7, 8])
    assert keys([1, 2, 3, 4, 5, 6, 7, 8]) == one
    assert keys([1, 2, 3, 4, 5, 6, 7, 9])[0] == one[0] != one[1]
    assert not set(keys([0, 2, 3, 4, 5, 6, 7, 8])) & set(one)
    assert not set(keys([1, 2, 3, 4, 5, 6, 7, 8], b"b")) & set(one)


def test_a_block_in_use_is_found_and_outlives_its_first_user():
    pool = SharedBlocks(4)
    blocks = filled(pool, [b"a", b"b"])
    assert pool.find([b"a", b"b", b"c"]) == blocks
    pool.give_back(blocks)
    assert (pool.num_free, pool.num_kept) == (2, 0)
    pool.give_back(blocks)
    assert (pool.num_free, pool.num_kept) == (4, 2)
    assert pool.find([b"b", b"a"]) == blocks[1:] + blocks[:1]


def test_only_the_beginning_of_a_chain_is_found():
    pool = SharedBlocks(4)
    filled(pool, [b"a", b"c"])
    assert pool.find([b"a", b"b", b"c"]) == [1]


def test_blocks_without_user_go_in_the_order_of_their_last_use_from_the_end_of_the_chain():
    pool = SharedBlocks(4)
    first, second = filled(pool, [b"a", b"b"]), filled(pool, [b"x", b"y"])
    pool.give_back(first)
    pool.give_back(second)
    pool.give_back(pool.find([b"a", b"b"]))
    assert pool.take(1) == [second[1]]
    assert pool.take(1) == [second[0]]
    assert pool.take(1) == [first[1]]
    assert pool.find([b"x"]) == [] and pool.find([b"a", b"b"]) == [first[0]]


def test_the_same_tokens_computed_twice_are_kept_once():
    pool = SharedBlocks(3)
    twice = [*filled(pool, [b"a"]), *filled(pool, [b"a"])]
    pool.give_back(twice)
    assert (pool.num_free, pool.num_kept) == (3, 1)


def test_a_lost_cache_is_forgotten():
    pool = SharedBlocks(3)
    pool.give_back(filled(pool, [b"a", b"b"]))
    pool.forget()
    assert pool.find([b"a"]) == [] and (pool.num_free, pool.num_kept) == (3, 0)
    assert sorted(pool.take(3)) == [1, 2, 3]


@pytest.mark.parametrize("size", [1, 2, 4, 12, 40])
def test_reuse_changes_no_logit_whatever_the_batch(shared_engine, size):
    prompts = [PROMPT[:33] + [200 + i] * (i % 3) for i in range(size)]
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    known = shared_engine(deterministic=True, hash_logits=True).generate(prompts, params)
    engine = shared_engine(deterministic=True, hash_logits=True, prefix_reuse=True)
    engine.generate([PROMPT[:33]], params)
    again = engine.generate(prompts, params)
    assert [done.logits_sha256 for done in again] == [done.logits_sha256 for done in known]
    for done in again:
        assert (done.reused_tokens, done.rows) == (32, len(done.prompt_token_ids) + 1 - 32)


@pytest.mark.parametrize("length", [1, 16, 17, 32, 33])
def test_the_last_token_of_a_prompt_always_runs(make_engine, length):
    engine = make_engine(prefix_reuse=True)
    first, second = (engine.generate([PROMPT[:length]], PARAMS)[0] for _ in range(2))
    assert second.reused_tokens == (length - 1) // 16 * 16 and first.reused_tokens == 0
    assert second.token_ids == first.token_ids


def test_an_answer_is_reused_as_the_beginning_of_the_next_question(make_engine):
    engine = make_engine(prefix_reuse=True)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    first = engine.generate([PROMPT], params)[0]
    turn = [*first.prompt_token_ids, *first.token_ids, 7, 8]
    assert engine.generate([turn], PARAMS)[0].reused_tokens == 64
    stats = engine.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (50 + 72, 64)


def ban(engine):
    engine.control.ban_expert(None, 0)


def favour(engine):
    engine.control.set_bias(1, 2, 0.5)


def smooth(engine):
    engine.control.set_smoothing(1.0)


def limit(engine):
    engine.control.set_capacity(16.0)


def broken(engine):
    engine.control.inject("experts.compute", lambda rows: rows * 0.5, 60)


def healed(engine):
    engine.control.inject("gate.logits", lambda logits: logits + 1, 60)
    engine.generate([PROMPT], PARAMS)
    engine.control.clear("gate.logits")


def test_nothing_is_shared_while_rows_depend_on_the_others_of_their_step(make_engine):
    engine = make_engine(prefix_reuse=True)
    limit(engine)
    assert [engine.generate([PROMPT], PARAMS)[0].reused_tokens for _ in range(2)] == [0, 0]
    engine.control.set_capacity(None)
    assert engine.generate([PROMPT], PARAMS)[0].reused_tokens == 0
    auto = replace(engine.control.policy, precision=Precision("auto"))
    assert engine.control.conditions is not None
    engine.control.set_policy(auto)
    assert engine.control.conditions is None


@pytest.mark.parametrize("change", [ban, favour, smooth, broken, healed])
def test_nothing_is_shared_across_what_changes_the_computation(make_engine, change):
    options = {"deterministic": True, "hash_logits": True}
    fresh, engine = make_engine(**options), make_engine(prefix_reuse=True, **options)
    engine.generate([PROMPT], PARAMS)
    change(engine), change(fresh)
    changed = engine.generate([PROMPT], PARAMS)[0]
    assert changed.reused_tokens == 0
    assert changed.logits_sha256 == fresh.generate([PROMPT], PARAMS)[0].logits_sha256


def test_a_policy_taken_back_finds_what_was_computed_under_it(make_engine):
    engine = make_engine(prefix_reuse=True)
    engine.generate([PROMPT], PARAMS)
    ban(engine)
    for reused in (0, 48):
        assert engine.generate([PROMPT], PARAMS)[0].reused_tokens == reused
    engine.control.clear_policy()
    assert engine.generate([PROMPT], PARAMS)[0].reused_tokens == 48


def test_a_request_that_saw_a_change_shares_only_what_came_before_it(make_engine):
    engine = make_engine(prefix_reuse=True, max_step_tokens=16)
    engine.add(PROMPT, PARAMS)
    engine.step()
    ban(engine)
    while engine.has_work:
        engine.step()
    assert engine.generate([PROMPT], PARAMS)[0].reused_tokens == 0
    engine.control.clear_policy()
    assert engine.generate([PROMPT], PARAMS)[0].reused_tokens == 16


def test_a_change_in_the_middle_of_a_step_is_noticed(make_engine):
    engine = make_engine(prefix_reuse=True)
    run = engine._runner.run

    def meddled(*arguments):
        result = run(*arguments)
        engine.control.ban_expert(None, 0)
        return result

    engine._runner.run = meddled
    engine.generate([PROMPT], SamplingParams(max_tokens=1))
    engine._runner.run = run
    engine.control.clear_policy()
    assert engine.generate([PROMPT], PARAMS)[0].reused_tokens == 0


def test_watched_tokens_are_computed_so_that_their_decision_exists(make_engine):
    listener = Listener()
    engine = make_engine(listener, prefix_reuse=True)
    engine.generate([PROMPT], PARAMS)
    engine.finish([engine.add(PROMPT, PARAMS, watch=[20])])
    decided = [d for step in listener.of(StepEvent) for d in step.decisions]
    assert {decision.position for decision in decided} == {20}
    positions = [
        p for step in listener.of(StepEvent) for p in step.positions[step.request_ids == 1]
    ]
    assert min(positions) == 16


def test_preempted_requests_find_their_own_blocks_and_books_stay_right(make_engine):
    listener = Listener()
    options = {"deterministic": True, "hash_logits": True}
    prompts = [PROMPT[i:] + PROMPT[:i] for i in range(4)]
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    known = make_engine(**options).generate(prompts, params)
    engine = make_engine(listener, prefix_reuse=True, num_blocks=16, **options)
    done = engine.generate(prompts, params)
    assert [one.logits_sha256 for one in done] == [one.logits_sha256 for one in known]
    extra = sum(sum(one.extra_rows.values()) for one in done)
    assert 0 < extra < 3 * 50
    rows = sum(step.num_rows for step in listener.of(StepEvent))
    assert rows == extra + sum(one.rows for one in done)
    assert engine.stats().num_free_blocks == 16


def test_decodes_that_share_blocks_attend_to_them_all(make_engine):
    """Not deterministic: the attention that reads blocks in place must see a shared one twice."""
    plain, engine = make_engine(), make_engine(prefix_reuse=True)
    prompts = [[*PROMPT, i] for i in range(6)]
    engine.generate([PROMPT], PARAMS)
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=1)
    for one, other in zip(
        plain.generate(prompts, params), engine.generate(prompts, params), strict=True
    ):
        assert other.reused_tokens == 48 and one.token_ids == other.token_ids
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-3)


def test_reuse_is_off_unless_asked_for(make_engine):
    engine = make_engine()
    assert [engine.generate([PROMPT], PARAMS)[0].reused_tokens for _ in range(2)] == [0, 0]
    assert engine.stats().num_kept_blocks == engine.stats().prefix_queries == 0
