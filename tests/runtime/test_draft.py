"""A draft changes how fast a text comes, never which: ids, logits, caches, counts stay."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from engine import Engine, EngineConfig, SamplingParams
from engine.checkpoint.load import read_config
from engine.errors import ConfigError
from engine.events import CAUSES, StepEvent
from engine.routing.speculation import Speculation
from engine.runtime.draft.network import DraftNetwork, Feed
from engine.train.loading import load_network
from tests.runtime.conftest import DRAFT, MODEL, Listener
from tests.runtime.scripted import SAYINGS, Scripted, wrong

EXACT = {"deterministic": True, "hash_logits": True, "num_threads": None}
GREEDY = SamplingParams(max_tokens=10, ignore_eos=True)
DRAWN = dataclasses.replace(GREEDY, temperature=0.9, top_k=40, top_p=0.95, seed=11)


def batch_of(prompts, size):
    return [prompts[i % len(prompts)] + "x" * (i // len(prompts)) for i in range(size)]


def outcome(done):
    """All that a draft must not change."""
    return (done.token_ids, done.text, done.finish_reason, done.logits_sha256, done.logprobs)


def scripted(engine: Engine, texts, say, longest: int) -> Engine:
    """Give an engine a draft that says what it is told to, `longest` tokens in every step."""
    engine._drafter.network = Scripted(texts, say)
    engine._drafter.policy = Speculation(longest, adaptive=False)
    return engine


@pytest.fixture(scope="module")
def plain():
    from tests.runtime.conftest import _engine

    return _engine(deterministic=True, hash_logits=True)


@pytest.fixture(scope="module")
def drafting():
    options = EXACT | {"draft": DRAFT, "draft_length": "fixed", "draft_tokens": 3}
    return Engine(EngineConfig(model=MODEL, num_blocks=512, **options))


@pytest.fixture(scope="module")
def told(plain):
    """An engine whose draft is scripted by each test."""
    from tests.runtime.conftest import PROMPTS

    engine = Engine(EngineConfig(model=MODEL, num_blocks=512, draft=DRAFT, **EXACT))
    done = plain.generate(list(PROMPTS), GREEDY)
    engine.texts = [[*one.prompt_token_ids, *one.token_ids] for one in done]
    engine.wanted = [outcome(one) for one in done]
    return engine


# --- the draft itself -----------------------------------------------------------------------------


def test_the_lean_path_computes_what_the_trained_network_does():
    network = DraftNetwork(DRAFT, read_config(DRAFT), 64)
    trained = load_network(DRAFT)
    ids = np.random.default_rng(0).integers(5, 4000, 40).tolist()
    with torch.inference_mode():
        wanted = trained(torch.tensor([ids]))[0][0]
        first, second = network.remember(), network.remember()
        network.run([Feed(first, ids[:7]), Feed(second, ids[:30])])
        got = network.run([Feed(first, ids[7:8]), Feed(second, ids[30:33])])
        torch.testing.assert_close(got, wanted[[7, 32]], atol=1e-3, rtol=1e-4)
        second.roll_back(9)
        network.run([Feed(second, ids[9:20])])
        got = network.run([Feed(second, ids[20:21])])
        torch.testing.assert_close(got[0], wanted[20], atol=1e-3, rtol=1e-4)
        got = network.run([Feed(second, ids[21:24])])  # few rows, one by one
        torch.testing.assert_close(got[0], wanted[23], atol=1e-3, rtol=1e-4)
        got = network.run([Feed(second, ids[24:38])])  # many in one go, after them
        torch.testing.assert_close(got[0], wanted[37], atol=1e-3, rtol=1e-4)
        torch.testing.assert_close(network.read(ids, 5), wanted[34:39], atol=1e-3, rtol=1e-4)


# --- identity -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4, 12, 40])
def test_logits_are_bitwise_those_without_a_draft(plain, drafting, prompts, size):
    params = dataclasses.replace(GREEDY, max_tokens=6)
    batch = batch_of(prompts, size)
    with_draft = drafting.generate(batch, params)
    alone = plain.generate(batch[:2], params)
    assert [outcome(one) for one in with_draft[:2]] == [outcome(one) for one in alone]
    assert drafting.stats().draft["accepted"] > 0


@pytest.mark.parametrize("say", SAYINGS)
@pytest.mark.parametrize("longest", [1, 3, 5])
def test_whatever_is_proposed_the_text_is_the_targets(told, prompts, say, longest):
    engine = scripted(told, told.texts, SAYINGS[say], longest)
    done = engine.generate(prompts, GREEDY)
    assert [outcome(one) for one in done] == told.wanted
    accepted = sum(one.draft.accepted for one in done)
    assert accepted == 0 if say == "always wrong" else accepted > 0


@pytest.mark.slow
@pytest.mark.parametrize("say", SAYINGS)
def test_two_hundred_prompts_are_continued_as_without_a_draft(told, plain, prompts, say):
    batch = batch_of(prompts, 200)
    done = plain.generate(batch, GREEDY)
    texts = [[*one.prompt_token_ids, *one.token_ids] for one in done]
    for longest in range(1, 6):
        engine = scripted(told, texts, SAYINGS[say], longest)
        again = engine.generate(batch, GREEDY)
        assert [outcome(one) for one in again] == [outcome(one) for one in done]


def test_sampling_draws_the_same_tokens_with_the_same_seed(plain, drafting, prompts):
    params = dataclasses.replace(DRAWN, logprobs=3)
    wanted, got = plain.generate(prompts, params), drafting.generate(prompts, params)
    assert [outcome(one) for one in got] == [outcome(one) for one in wanted]
    assert sum(one.draft.accepted for one in got) > 0


def test_by_chance_more_proposals_stand_and_what_is_cut_off_never_comes(make_engine, prompts):
    params = dataclasses.replace(DRAWN, temperature=1.0, top_k=2, top_p=1.0, logprobs=2)
    options = {"draft": DRAFT, "draft_length": "fixed", "draft_tokens": 3, "num_blocks": 64}
    engine = make_engine(draft_sampling="rejection", **options)
    done = engine.generate(prompts, params)
    for one in done:
        assert len(one.token_ids) == len(one.logprobs) == 10
        assert all(at.token_id in {token for token, _ in at.top} for at in one.logprobs)
    same = make_engine(**options).generate(prompts, params)
    stood, alike = (sum(one.draft.accepted for one in runs) for runs in (done, same))
    assert stood > 1.1 * alike
    greedy = [one.token_ids for one in engine.generate(prompts, GREEDY)]
    assert greedy == [one.token_ids for one in make_engine(**options).generate(prompts, GREEDY)]


def test_it_goes_on_beside_prefills_in_chunks_and_preemption(plain, prompts):
    engine = Engine(
        EngineConfig(
            model=MODEL,
            draft=DRAFT,
            draft_length="fixed",
            block_size=4,
            num_blocks=18,
            max_step_tokens=9,
            **EXACT,
        )  # fmt: skip
    )
    wanted, got = plain.generate(prompts, GREEDY), engine.generate(prompts, GREEDY)
    assert [outcome(one) for one in got] == [outcome(one) for one in wanted]
    assert sum(one.extra_rows.get("preemption", 0) for one in got) > 0
    assert sum(one.draft.accepted for one in got) > 0
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_it_goes_on_beside_blocks_that_are_reused(make_engine, told, prompts):
    engine = make_engine(block_size=4, prefix_reuse=True, draft=DRAFT, **EXACT)
    scripted(engine, told.texts, SAYINGS["by chance"], 3)
    for again in range(2):
        done = engine.generate(prompts, GREEDY)
        assert [outcome(one) for one in done] == told.wanted
        assert (sum(one.reused_tokens for one in done) > 0) is bool(again)
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_a_rule_that_accepts_what_was_not_drawn_is_caught(told, prompts, monkeypatch):
    monkeypatch.setattr("engine.runtime.runner.num_kept", lambda drafts, drawn: len(drawn))
    engine = scripted(told, told.texts, wrong, 2)
    assert [outcome(one) for one in engine.generate(prompts, GREEDY)] != told.wanted


# --- rows, caches, ends ---------------------------------------------------------------------------


def test_rows_count_each_token_once_and_rejected_ones_stand_beside(told, prompts):
    engine = scripted(told, told.texts, wrong, 3)
    for done in engine.generate(prompts, GREEDY):
        assert done.rows == len(done.prompt_token_ids) + len(done.token_ids) - 1
        # The last token needs no company, the two before it only as much as is left to write.
        assert done.extra_rows == {"rejected_draft": 3 * 7 + 2 + 1}
        assert (done.draft.proposed, done.draft.accepted, done.draft.steps) == (24, 0, 10)


def test_each_row_of_a_batch_keeps_its_own(told, prompts):
    only_first = Scripted(told.texts[:1], lambda token_id: token_id)
    told._drafter.network = only_first
    told._drafter.policy = Speculation(3, adaptive=False)
    first, *others = told.generate(prompts, GREEDY)
    assert first.draft.accepted == 7 and first.draft.steps == 3
    assert all(one.draft.accepted < 7 for one in others)


def held(engine: Engine) -> tuple[list[int], torch.Tensor]:
    """The blocks of the one running sequence, and what they hold."""
    (sequence,) = engine._scheduler.running
    cache = engine._runner.rank.cache
    blocks = sequence.blocks
    return blocks, torch.stack([cache._keys[:, blocks], cache._values[:, blocks]]).clone()


@pytest.mark.parametrize("say", ["always wrong", "by chance"])
def test_rolling_back_leaves_the_cache_as_without_a_draft(make_engine, told, prompts, say):
    without = make_engine(block_size=4, **EXACT)
    other = make_engine(block_size=4, draft=DRAFT, **EXACT)
    with_draft = scripted(other, told.texts, SAYINGS[say], 5)
    for engine in (without, with_draft):
        engine.add(prompts[0], GREEDY)
        engine.step()
    for _ in range(8):
        if not with_draft.has_work:
            break
        with_draft.step()
        while (
            without._scheduler.running
            and with_draft._scheduler.running
            and (
                without._scheduler.running[0].num_computed
                < with_draft._scheduler.running[0].num_computed
            )
        ):
            without.step()
        if with_draft._scheduler.running:
            blocks, values = held(with_draft)
            wanted_blocks, wanted = held(without)
            assert blocks == wanted_blocks and torch.equal(values, wanted)
            memory = with_draft._scheduler.running[0].draft.memory
            assert memory.length <= with_draft._scheduler.running[0].num_computed


def test_an_end_within_an_accepted_run_ends_everything_there(told, prompts):
    params = SamplingParams(max_tokens=10, logprobs=0)
    text = told.texts[0]
    start = len(text) - 10
    eos = told.model_config.eos_token_id

    def only_eos(logits_BV):  # the fourth token of the answer is the end of the text
        logits_BV[:, eos] = torch.where(logits_BV.argmax(-1) == text[start + 3], 1e9, -1e9)
        return logits_BV

    spoken = [*text[: start + 3], eos, 11, 12, 13, 14]
    engine = scripted(told, [spoken], lambda token_id: token_id, 5)
    engine.faults.set("sampler.noise", only_eos)
    listener = Listener()
    engine.sink = engine._announcer._sink = listener
    try:
        (done,) = engine.generate([prompts[0]], params)
    finally:
        engine.faults.clear("sampler.noise")
        engine.sink = engine._announcer._sink = Listener()
        engine.sink.enabled = False
    assert done.finish_reason == "stop" and done.token_ids == (*text[start : start + 3], eos)
    assert len(done.logprobs) == 4 and done.rows == start + 3
    steps = listener.of(StepEvent)
    accepted = sum(int((step.causes == 0).sum()) for step in steps)
    rejected = sum(int((step.causes == CAUSES.index("rejected_draft")).sum()) for step in steps)
    assert accepted == done.rows and rejected == done.extra_rows["rejected_draft"] > 0


def test_a_stop_string_within_an_accepted_run_leaks_nothing(told, plain, prompts):
    word = plain.tokenizer.decode(told.texts[0][-6:-4])
    params = dataclasses.replace(GREEDY, stop=(word,))
    engine = scripted(told, told.texts, lambda token_id: token_id, 5)
    (got,), (wanted,) = (e.generate([prompts[0]], params) for e in (engine, plain))
    assert outcome(got) == outcome(wanted) and word not in got.text


def test_an_aborted_request_leaves_nothing(told, prompts):
    engine = scripted(told, told.texts, wrong, 4)
    request = engine.add(prompts[1], GREEDY)
    engine.step()
    engine.step()
    engine.abort(request)
    outputs = engine.step()
    assert outputs[-1].completion.finish_reason == "aborted"
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_events_say_which_rows_were_proposed(make_engine, told, prompts):
    listener = Listener()
    engine = make_engine(listener, draft=DRAFT, **EXACT)
    scripted(engine, told.texts, SAYINGS["by chance"], 3).generate(prompts[:2], GREEDY)
    steps = [step for step in listener.of(StepEvent) if step.drafted is not None]
    causes = np.concatenate([step.causes[step.drafted == 1] for step in steps])
    names = {CAUSES[cause] for cause in causes.tolist()}
    assert names == {"accepted", "rejected_draft"}
    assert {"plan", "draft"} <= {name for step in steps for name, ms in step.stage_ms.items() if ms}
    assert all((step.causes[step.drafted == 0] == 0).all() for step in steps)


# --- giving up, and what is refused ---------------------------------------------------------------


def test_a_draft_that_no_longer_fits_is_switched_off(make_engine, prompts):
    engine = make_engine(draft=DRAFT)
    engine.control.inject("draft.propose", lambda logits: logits.roll(1, dims=-1), lease_s=600)
    params = SamplingParams(max_tokens=120, ignore_eos=True)
    (done,) = engine.generate([prompts[7]], params)
    assert done.draft.accepted <= 3
    assert done.draft_switched and done.draft_switched[0][0] <= 50


def test_nothing_is_proposed_while_smoothing_leans_on_the_token_before(make_engine, prompts):
    engine = make_engine(draft=DRAFT, draft_length="fixed")
    engine.control.set_smoothing(0.5)
    (done,) = engine.generate([prompts[7]], GREEDY)
    assert done.draft.proposed == 0


def test_a_draft_that_cannot_fit_is_refused_in_a_sentence(tmp_path):
    from tests.checkpoint.folders import SHAPE, random_tensors, write_folder

    raw = SHAPE | {"model_type": "qwen3"}
    for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"):
        raw.pop(name)
    small = write_folder(tmp_path / "small", random_tensors(raw), raw=raw)
    for options, words in (
        ({"draft": small}, "vocab_size 40.*4096; both must have one vocabulary"),
        ({"draft": MODEL}, "family qwen3_moe; a draft must be a dense model of family qwen3"),
        ({"draft": DRAFT, "num_ranks": 2}, "proposes to one process only"),
        ({"draft": DRAFT, "draft_tokens": 0}, "draft_tokens .0. must lie between 1 and 16"),
        ({"draft": DRAFT, "deterministic": True, "draft_sampling": "rejection"}, "must be same"),
        ({"draft": DRAFT, "draft_length": "long"}, "draft_length .*adaptive.*fixed"),
    ):
        with pytest.raises(ConfigError, match=words):
            Engine(EngineConfig(model=MODEL, **options))


def test_another_tokenizer_is_refused(tmp_path):
    import json
    import shutil

    folder = shutil.copytree(DRAFT, tmp_path / "draft")
    tokens = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokens["model"]["vocab"]
    first, second = [name for name, token_id in vocabulary.items() if token_id in (300, 301)]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokens), encoding="utf-8")
    with pytest.raises(ConfigError, match="another tokenizer"):
        Engine(EngineConfig(model=MODEL, draft=folder))
