"""The unmodified `openai` client against the service."""

from __future__ import annotations

import openai
import pytest

from engine import SamplingParams
from tests.serve.conftest import NAME


@pytest.fixture
def greedy(sdk):
    def ask(prompt="Der Server", **options):
        options = {"max_tokens": 12, "temperature": 0} | options
        return sdk.completions.create(model=NAME, prompt=prompt, **options)

    return ask


def test_a_completion_is_the_engines_text(greedy, server):
    answer = greedy(max_tokens=12, extra_body={"ignore_eos": True})
    choice, usage = answer.choices[0], answer.usage
    tokenizer = server.service.engine.tokenizer
    assert answer.object == "text_completion" and answer.model == NAME
    assert choice.finish_reason == "length" and usage.completion_tokens == 12
    assert usage.prompt_tokens == len(tokenizer.encode("Der Server"))
    assert usage.total_tokens == usage.prompt_tokens + 12
    by_ids = greedy(tokenizer.encode("Der Server"), extra_body={"ignore_eos": True})
    assert choice.text and choice.text == by_ids.choices[0].text


def test_a_stream_adds_up_to_the_whole_answer(greedy):
    whole = greedy(logprobs=2)
    chunks = list(greedy(logprobs=2, stream=True, stream_options={"include_usage": True}))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    assert choices[-1].finish_reason == whole.choices[0].finish_reason
    assert not any(choice.finish_reason for choice in choices[:-1])
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    told = [choice.logprobs for choice in choices if choice.logprobs]
    for field in ("tokens", "token_logprobs", "text_offset"):
        streamed = [value for one in told for value in getattr(one, field)]
        assert streamed == getattr(whole.choices[0].logprobs, field)


def test_logprobs_name_the_tokens_and_their_places(greedy):
    told = greedy(logprobs=3).choices[0].logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.text_offset) == 12
    assert told.text_offset[0] == 0
    assert all(len(best) == 3 for best in told.top_logprobs)
    for token, value, best in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
        assert best[token] == pytest.approx(value) and value == max(best.values())


def test_a_chat_is_answered_and_streamed(sdk):
    ask = {
        "model": NAME,
        "messages": [
            {"role": "system", "content": "Der Server"},
            {"role": "user", "content": [{"type": "text", "text": "ist"}]},
        ],
        "max_completion_tokens": 8,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = sdk.chat.completions.create(**ask)
    message = whole.choices[0].message
    assert whole.object == "chat.completion" and message.role == "assistant"
    chunks = list(sdk.chat.completions.create(**ask, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == message.content
    entries = whole.choices[0].logprobs.content
    assert len(entries) == whole.usage.completion_tokens
    streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [e.token for e in streamed] == [e.token for e in entries]
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == message.content
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


def test_seeds_decide_what_is_drawn_and_n_draws_apart(greedy):
    drawn = {"temperature": 1.0, "max_tokens": 10, "n": 3}
    first, again = greedy(seed=5, **drawn), greedy(seed=5, **drawn)
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in again.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts[0] == greedy(seed=5, temperature=1.0, max_tokens=10).choices[0].text
    assert texts != [choice.text for choice in greedy(seed=6, **drawn).choices]


def test_several_prompts_are_answered_in_their_order(greedy):
    prompts = ["Der Server", "12 * 7 = ", "Le serveur"]
    together = greedy(prompts)
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    assert [c.text for c in together.choices] == [greedy(p).choices[0].text for p in prompts]


def test_a_stop_string_over_token_borders_leaks_nothing(greedy):
    text = greedy(max_tokens=24).choices[0].text
    stop = text[len(text) // 2 - 3 : len(text) // 2 + 3]
    wanted = text[: text.index(stop)]
    whole = greedy(max_tokens=24, stop=[stop, "never written"]).choices[0]
    assert (whole.text, whole.finish_reason) == (wanted, "stop")
    streamed = list(greedy(max_tokens=24, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == wanted
    assert streamed[-1].choices[0].finish_reason == "stop"


def test_the_models_are_listed(sdk):
    (model,) = sdk.models.list().data
    assert model.id == NAME and sdk.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("another")


def test_refusals_come_as_the_clients_own_errors(greedy, sdk):
    with pytest.raises(openai.BadRequestError) as refused:
        greedy(temperature=3.0)
    assert refused.value.param == "temperature" and refused.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        sdk.completions.create(model="gpt-9", prompt="x")
    assert missing.value.code == "model_not_found"


def test_the_engine_alone_writes_the_same(greedy, server):
    """What HTTP says is what `Engine.generate` says, asked on the engine's own thread."""
    from concurrent.futures import Future

    done: Future[str] = Future()
    engine = server.service.engine

    def ask():
        params = SamplingParams(max_tokens=12)
        done.set_result(engine.generate(["Der Server"], params)[0].text)

    server.service.loop._todo.put(ask)
    assert greedy().choices[0].text == done.result(10)
