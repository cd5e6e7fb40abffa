"""Requests through the engine: limits, ends, streaming, rows, events."""

from __future__ import annotations

import numpy as np
import pytest

from engine import SamplingParams
from engine.errors import ConfigError, MachineError, RequestError
from engine.events import RequestEvent, StartEvent, StepEvent, TextEvent
from engine.faults import Faults
from engine.routing.device import TILE_ROWS
from engine.routing.placement import filled
from tests.runtime.conftest import Listener

GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)


def run(engine):
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


@pytest.mark.parametrize(("num_new", "num_rows"), [(0, 5), (1, 5), (2, 6), (7, 11)])
def test_a_prompt_of_five_routes_one_row_per_token_but_the_last_new_one(
    make_engine, num_new, num_rows
):
    listener = Listener()
    engine = make_engine(listener)
    params = SamplingParams(max_tokens=num_new, ignore_eos=True)
    done = engine.generate([[0, 40, 41, 42, 43]], params)[0]
    steps = listener.of(StepEvent)
    assert done.rows == num_rows == sum(step.num_rows for step in steps)
    tokens = np.concatenate([step.token_ids for step in steps]).tolist()
    assert tokens == [*done.prompt_token_ids, *done.token_ids][:num_rows]
    assert np.concatenate([step.positions for step in steps]).tolist() == list(range(num_rows))
    assert steps[0].topk_ids.shape == (5, 4, 2)
    assert len(done.token_ids) == num_new


@pytest.mark.parametrize(
    "prompt", ["", [], [-1], [4096], [2**31], ["5"], [1.5], [True], "a\ud800", None, 5]
)
def test_an_empty_prompt_or_a_bad_id_is_refused_and_the_next_request_works(shared_engine, prompt):
    engine = shared_engine()
    with pytest.raises(RequestError):
        engine.add(prompt, GREEDY)
    assert engine.generate(["12 * 7 = "], GREEDY)[0].finish_reason == "length"


@pytest.mark.parametrize("max_tokens", [-1, 1.5, "8", True])
def test_a_bad_number_of_tokens_is_refused(max_tokens):
    with pytest.raises(ConfigError, match="max_tokens"):
        SamplingParams(max_tokens=max_tokens)


@pytest.mark.parametrize("watch", [["1"], [None], [1.0], [True], [-1], [2]])
def test_a_bad_watched_token_is_refused(shared_engine, watch):
    with pytest.raises(RequestError, match="watched token"):
        shared_engine().add([5], SamplingParams(max_tokens=1), watch=watch)


def test_a_cache_no_machine_could_hold_is_refused_with_its_size(make_engine):
    for options in ({"num_blocks": 10**12}, {"block_size": 10**15}, {"block_size": 10**30}):
        with pytest.raises(MachineError, match="GB"):
            make_engine(**options)


def test_sizes_at_the_edge_are_answered_or_refused_with_the_limit(make_engine):
    engine = make_engine(max_model_len=32)
    zero, one = SamplingParams(max_tokens=0), SamplingParams(max_tokens=1, ignore_eos=True)
    assert engine.generate([[5] * 31], one)[0].rows == 31
    assert engine.generate([[5] * 32], zero)[0].rows == 32
    for prompt, params in [
        ([5] * 32, one),
        ([5] * 33, zero),
        ([5] * 320, zero),
        ([5], SamplingParams(max_tokens=10**9)),
    ]:
        with pytest.raises(RequestError, match="32"):
            engine.add(prompt, params)
    open_end = SamplingParams(max_tokens=None, ignore_eos=True)
    assert len(engine.generate([[5] * 30], open_end)[0].token_ids) == 2
    assert not engine.has_work


def test_a_request_that_no_cache_could_hold_is_refused(make_engine):
    engine = make_engine(num_blocks=4, block_size=8)
    with pytest.raises(RequestError, match="cache blocks"):
        engine.add([5] * 30, SamplingParams(max_tokens=4))


def test_generate_takes_all_prompts_or_none(make_engine):
    engine = make_engine()
    with pytest.raises(RequestError):
        engine.generate(["fine", ""], GREEDY)
    assert not engine.has_work
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_generate_that_is_refused_leaves_other_requests_alone(make_engine):
    engine = make_engine()
    other = engine.add("Der Server", GREEDY)
    with pytest.raises(RequestError):
        engine.generate(["fine", ""], GREEDY)
    assert engine.stats().steps == 0 and engine.stats().num_waiting == 1
    assert [output.request_id for output in engine.step()] == [other]


def test_logits_that_find_no_room_halfway_give_their_blocks_back(make_engine):
    engine = make_engine(num_blocks=10, block_size=4, max_step_tokens=8)
    engine.add([5] * 24, GREEDY)
    for _ in range(3):
        engine.step()
    free = engine.stats().num_free_blocks
    assert 2 <= free < 5
    with pytest.raises(RequestError, match="cache blocks"):
        engine.logits([6] * 20)
    assert engine.stats().num_free_blocks == free


def test_a_request_is_announced_before_anybody_can_run_it(make_engine):
    listener = Listener()
    engine = make_engine(listener)
    waiting = []
    listener.emit = lambda event: waiting.append((event.kind, engine.stats().num_waiting))
    engine.add("Der", GREEDY)
    assert waiting == [("added", 0)] and engine.stats().num_waiting == 1


def test_streamed_deltas_add_up_to_the_text(shared_engine, prompts):
    engine = shared_engine()
    ids = [engine.add(prompt, GREEDY) for prompt in prompts]
    outputs = run(engine)
    for request_id in ids:
        mine = [output for output in outputs if output.request_id == request_id]
        assert "".join(output.delta for output in mine) == mine[-1].completion.text
        assert [token for output in mine for token in output.token_ids] == list(
            mine[-1].completion.token_ids
        )
        assert [output.finished for output in mine] == [False] * (len(mine) - 1) + [True]


def test_a_stop_string_ends_the_request_and_is_not_in_the_text(shared_engine):
    engine = shared_engine()
    whole = engine.generate(["12 * 7 = "], SamplingParams(max_tokens=12, ignore_eos=True))[0]
    stop = whole.text[3:5]
    done = engine.generate(
        ["12 * 7 = "], SamplingParams(max_tokens=12, ignore_eos=True, stop=(stop,))
    )[0]
    assert done.finish_reason == "stop"
    assert done.text == whole.text[: whole.text.find(stop)]
    assert len(done.token_ids) < 12


def test_end_of_text_counts_as_a_token_and_shows_no_text(make_engine):
    faults = Faults()
    engine = make_engine(None, faults)

    def only_eos(logits):
        logits = logits * 0
        logits[:, engine.model_config.eos_token_id] = 9.0
        return logits

    faults.set("sampler.noise", only_eos)
    done = engine.generate(["Sie"], SamplingParams(max_tokens=5))[0]
    assert (done.finish_reason, done.text, len(done.token_ids)) == ("stop", "", 1)
    kept = engine.generate(["Sie"], SamplingParams(max_tokens=5, ignore_eos=True))[0]
    assert (kept.finish_reason, len(kept.token_ids)) == ("length", 5)


def test_seeds_repeat_and_do_not_depend_on_the_batch(make_engine, prompts):
    engine = make_engine(deterministic=True)
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=11, ignore_eos=True)
    alone = engine.generate([prompts[0]], params)[0].token_ids
    assert engine.generate(prompts, params)[0].token_ids == alone
    other = SamplingParams(max_tokens=10, temperature=1.0, seed=12, ignore_eos=True)
    assert engine.generate([prompts[0]], other)[0].token_ids != alone


def test_requests_without_a_seed_draw_apart_and_follow_the_engines_seed(make_engine):
    params = SamplingParams(max_tokens=10, temperature=1.5, ignore_eos=True)

    def drawn(seed):
        done = make_engine(seed=seed, deterministic=True).generate(["Der", "Der"], params)
        return [one.token_ids for one in done]

    first = drawn(0)
    assert first[0] != first[1]
    assert drawn(0) == first
    assert not set(drawn(1)) & set(first)


def test_each_step_brings_the_logprobs_of_its_new_tokens(shared_engine):
    engine = shared_engine()
    params = SamplingParams(max_tokens=5, logprobs=2)
    asked, plain = engine.add("Le serveur", params), engine.add("Le serveur")
    outputs = []
    while not any(o.completion for o in outputs if o.request_id == asked):
        outputs += engine.step()
    engine.finish([plain])
    own = [output for output in outputs if output.request_id == asked]
    assert tuple(entry for o in own for entry in o.logprobs) == own[-1].completion.logprobs
    assert [entry.token_id for o in own for entry in o.logprobs] == [
        token for o in own for token in o.token_ids
    ]
    assert not any(o.logprobs for o in outputs if o.request_id == plain)


def test_logprobs_have_one_entry_per_token(shared_engine):
    done = shared_engine().generate(["Le serveur"], SamplingParams(max_tokens=5, logprobs=3))[0]
    assert len(done.logprobs) == len(done.token_ids)
    for entry, token_id in zip(done.logprobs, done.token_ids, strict=True):
        assert entry.token_id == token_id == entry.top[0][0]
        assert entry.logprob == pytest.approx(entry.top[0][1]) and entry.logprob < 0


def test_an_aborted_request_frees_its_blocks_while_others_go_on(make_engine):
    listener = Listener()
    engine = make_engine(listener, max_step_tokens=8)
    gone = engine.add([5] * 40, GREEDY)
    stays = engine.add([6] * 4, GREEDY)
    engine.step()
    engine.abort(gone)
    engine.abort(12345)
    outputs = run(engine)
    ended = {o.request_id: o.completion.finish_reason for o in outputs if o.finished}
    assert ended == {gone: "aborted", stays: "length"}
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    assert "aborted" in [event.kind for event in listener.of(RequestEvent)]


def test_a_full_batch_waits_its_turn_and_all_finish(make_engine, prompts):
    engine = make_engine(max_running=3, max_step_tokens=16)
    done = engine.generate(prompts * 2, GREEDY)
    assert [one.finish_reason for one in done] == ["length"] * 16
    assert engine.stats().num_running == 0


def test_preempted_rows_are_counted_by_their_cause(make_engine, prompts):
    listener = Listener()
    engine = make_engine(listener, block_size=4, num_blocks=18)
    done = engine.generate(prompts, GREEDY)
    steps = listener.of(StepEvent)
    again = sum(int((step.causes != 0).sum()) for step in steps)
    assert again == sum(one.extra_rows.get("preemption", 0) for one in done) > 0
    assert sum(step.num_rows for step in steps) - again == sum(one.rows for one in done)
    assert "preempted" in [event.kind for event in listener.of(RequestEvent)]


def test_events_tell_the_whole_story_of_a_request(make_engine):
    listener = Listener()
    engine = make_engine(listener, num_devices=4)
    engine.generate(["Der Server"], GREEDY, label="de")
    start = listener.of(StartEvent)[0]
    assert (start.num_experts, start.top_k, start.num_devices) == (8, 2, 4)
    assert [event.kind for event in listener.of(RequestEvent)] == ["added", "finished"]
    assert {event.label for event in listener.of(TextEvent)} == {"de"}
    for step in listener.of(StepEvent):
        assert step.topk_weights.sum(-1) == pytest.approx(1.0, abs=1e-5)
        assert (step.margins >= 0).all() and step.bad_rows == 0
        assert 0 < sum(step.stage_ms.values()) <= step.duration_ms * 1.05
        assert 0 < step.overhead_share < 1


def test_every_row_has_its_sequences_home_and_leaves_it_only_for_a_fair_share(make_engine, prompts):
    listener = Listener()
    engine = make_engine(listener, num_devices=3)
    everywhere = np.tile(np.arange(8), (4, 3))
    engine.control.publish_table(filled(everywhere, np.repeat(np.arange(3), 8), 8, 3, version=1))
    engine.generate(prompts, GREEDY)
    single = 0
    for step in listener.of(StepEvent):
        assert (step.homes == step.request_ids % 3).all()
        devices_TLK, experts_TLK = np.divmod(step.phy_ids, 8)
        assert (experts_TLK == step.topk_ids).all()
        for layer, expert in np.ndindex(4, 8):
            rows, slots = np.nonzero(step.topk_ids[:, layer] == expert)
            devices = devices_TLK[rows, layer, slots]
            share_in_tiles = -(-len(rows) // (3 * TILE_ROWS)) * TILE_ROWS
            assert np.bincount(devices, minlength=3).max() <= share_in_tiles
            if len(rows) == 1:
                assert devices == step.homes[rows]
                single += 1
    assert single and {0, 1, 2} == {int(h) for step in listener.of(StepEvent) for h in step.homes}


def test_nothing_is_recorded_when_nobody_listens(make_engine, monkeypatch):
    engine = make_engine()
    monkeypatch.setattr("engine.runtime.announcer.step_event", None)
    assert engine.generate(["Der"], GREEDY)[0].rows > 0


def test_bad_gate_logits_are_counted_and_never_break_the_step(make_engine):
    faults, listener = Faults(), Listener()
    engine = make_engine(listener, faults)

    def poison(logits):
        logits[0] = float("nan")
        return logits

    faults.set("gate.logits", poison)
    done = engine.generate(["Der Server"], SamplingParams(max_tokens=2, ignore_eos=True))[0]
    assert done.finish_reason == "length"
    assert engine.stats().bad_rows == 2 * 4
    ids = np.concatenate([step.topk_ids for step in listener.of(StepEvent)])
    assert ids.min() >= 0 and ids.max() < 8


def test_an_option_that_does_not_fit_the_model_is_refused(make_engine):
    with pytest.raises(ConfigError, match="max_model_len"):
        make_engine(max_model_len=10**6)


def test_bfloat16_runs_and_keeps_the_gate_in_fp32(make_engine):
    import torch

    engine = make_engine(dtype="bfloat16")
    parameters = engine._runner.rank.model.named_parameters()
    dtypes = {name.split(".")[-2]: parameter.dtype for name, parameter in parameters}
    assert dtypes["gate"] == torch.float32 and dtypes["qkv"] == torch.bfloat16
    assert len(engine.generate(["Der Server"], GREEDY)[0].token_ids) == 8
