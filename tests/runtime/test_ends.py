"""How requests end: every end-of-text id, finish and abort among others' requests."""

from __future__ import annotations

import json
import shutil

import pytest
from transformers import GenerationConfig

from engine import Engine, EngineConfig, SamplingParams
from engine.checkpoint.load import read_config
from engine.errors import ConfigError, RequestError
from tests.runtime.conftest import MODEL

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
LONGER = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture
def folder(tmp_path):
    """The bundled model without its hashes and its word on how to generate."""
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, tmp_path / name)
    return tmp_path


def always(engine, token_id):
    """Let the engine say `token_id` whatever it is asked."""

    def only(logits):
        logits = logits * 0
        logits[:, token_id] = 9.0
        return logits

    engine.faults.set("sampler.noise", only)


# --- every id that ends a text --------------------------------------------------------------------


@pytest.mark.parametrize("ends", [7, [7], [1, 7, 300], (300, 7)])
def test_each_id_of_a_generation_config_ends_a_text(folder, ends):
    GenerationConfig(eos_token_id=ends).save_pretrained(folder)
    engine = Engine(EngineConfig(model=folder, num_blocks=64))
    ends = [ends] if isinstance(ends, int) else list(ends)
    assert engine.model_config.eos_token_ids == set(ends)
    for token_id in (*ends, 8):
        always(engine, token_id)
        done = engine.generate(["Sie"], SamplingParams(max_tokens=3))[0]
        stopped = ("stop", 1) if token_id in ends else ("length", 3)
        assert (done.finish_reason, len(done.token_ids)) == stopped
        kept = engine.generate(["Sie"], SamplingParams(max_tokens=3, ignore_eos=True))[0]
        assert (kept.finish_reason, len(kept.token_ids)) == ("length", 3)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "first", "all_of_them"),
    [
        (5, None, 5, {5}),
        ([5, 6], None, 5, {5, 6}),
        ([5, 6], [7, 5], 7, {5, 7}),
        (5, [], None, set()),
        ([], None, None, set()),
        (0, None, 0, {0}),
        (5, 0, 0, {0}),
    ],
)
def test_the_generation_config_is_right_where_it_says_something(
    folder, in_config, in_generation, first, all_of_them
):
    raw = json.loads((folder / "config.json").read_text()) | {"eos_token_id": in_config}
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": in_generation}))
    config = read_config(folder)
    assert config.eos_token_id == first and config.eos_token_ids == all_of_them


@pytest.mark.parametrize("ends", [[1, 4096], [1, None], [1, "2"], [[1]], "1", True, [1, -1]])
def test_an_end_that_is_no_token_id_is_refused(folder, ends):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with pytest.raises(ConfigError, match="eos_token_id"):
        read_config(folder)


# --- finish and abort among others ----------------------------------------------------------------


def rest(engine):
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def text_of(outputs, request_id):
    return "".join(output.delta for output in outputs if output.request_id == request_id)


def test_what_others_gain_while_one_is_finished_is_returned_by_the_next_step(make_engine):
    engine = make_engine()
    short, long, also = (engine.add("Der Server", params) for params in (GREEDY, LONGER, GREEDY))
    (done,) = engine.finish([short])
    assert done.request_id == short and len(done.token_ids) == 6
    outputs = rest(engine)
    assert short not in {output.request_id for output in outputs}
    for request_id, length in ((long, 12), (also, 6)):
        mine = [output for output in outputs if output.request_id == request_id]
        assert [len(output.token_ids) for output in mine] == [1] * length
        assert mine[-1].completion.text == text_of(outputs, request_id)


def test_a_request_that_ended_while_another_was_finished_can_still_be_finished(make_engine):
    engine = make_engine()
    long, short = engine.add("Der Server", LONGER), engine.add("Le serveur", GREEDY)
    (first,) = engine.finish([long])
    steps = engine.stats().steps
    (second,) = engine.finish([short])
    assert (first.request_id, second.request_id) == (long, short)
    assert engine.stats().steps == steps and rest(engine) == []


def test_finishing_what_has_ended_is_refused_and_takes_nothing_from_others(make_engine):
    engine = make_engine()
    ended, other = engine.add("Der", GREEDY), engine.add("Der Server", LONGER)
    engine.finish([ended])
    for wrong in ([ended], [other, ended], [99], [other, 99]):
        with pytest.raises(RequestError, match="not under way"):
            engine.finish(wrong)
    outputs = rest(engine)
    assert [len(output.token_ids) for output in outputs] == [1] * 12
    assert outputs[-1].completion.text == text_of(outputs, other)
    assert engine.finish([]) == []


def test_aborting_what_has_ended_or_never_was_takes_nothing_from_others(make_engine):
    engine = make_engine()
    ended, other = engine.add("Der", GREEDY), engine.add("Der Server", LONGER)
    engine.finish([ended])
    for request_id in (ended, ended, 99, -1):
        engine.abort(request_id)
    (done,) = engine.finish([other])
    assert (done.finish_reason, len(done.token_ids)) == ("length", 12)
    assert rest(engine) == []


def breaks_in(engine, steps):
    """Let the engine's step fail after so many."""

    def broken(logits):
        nonlocal steps
        steps -= 1
        if steps < 0:
            raise OSError("the link is down")
        return logits

    engine.control.inject("sampler.noise", broken, lease_s=60)


def test_an_end_is_told_even_if_the_step_that_brought_it_breaks(make_engine):
    engine = make_engine()
    gone, other = engine.add("Der", GREEDY), engine.add("Der Server", GREEDY)
    engine.step()
    engine.abort(gone)
    breaks_in(engine, 0)
    with pytest.raises(OSError, match="link"):
        engine.step()
    engine.control.clear("sampler.noise")
    outputs = rest(engine)
    ends = {o.request_id: o.completion.finish_reason for o in outputs if o.finished}
    assert ends == {gone: "aborted", other: "length"}


def test_nothing_is_lost_when_a_step_breaks_while_requests_are_finished(make_engine):
    engine = make_engine()
    short, long, other = (engine.add("Der Server", params) for params in (GREEDY, LONGER, LONGER))
    breaks_in(engine, 8)
    with pytest.raises(OSError, match="link"):
        engine.finish([short, long])
    engine.control.clear("sampler.noise")
    done = engine.finish([short, long])
    assert [len(one.token_ids) for one in done] == [6, 12]
    outputs = rest(engine)
    assert [output.request_id for output in outputs] == [other] * 12
    assert outputs[-1].completion.text == text_of(outputs, other)


def test_a_closed_engine_has_nothing_left_to_take(make_engine):
    engine = make_engine()
    ended = engine.add("Der", GREEDY)
    engine.add("Der Server", LONGER)
    engine.finish([ended])
    engine.close()
    assert not engine.has_work and engine.step() == []
