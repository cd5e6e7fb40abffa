"""Sizes at the edge, bad ids, fields that are none: refused in fixed words, and no harm done."""

from __future__ import annotations

import json
import time

import pytest

from engine.serve.config import Limits
from tests.serve.conftest import NAME, slowly, until

V = 4096
BAD_IDS = [-1, V, 2**31, 2**63, "5", 1.5, True, None, [], {}]


def refused(response, code=None, param=None, status=400):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert code is None or error["code"] == code, error
    assert param is None or error["param"] == param, error
    return error["message"]


@pytest.fixture(autouse=True)
def _still_right(complete):
    """After every test the next good request is answered as before."""
    before = complete().json()["choices"]
    yield
    assert complete().json()["choices"] == before


def test_prompts_around_the_longest_text(complete, server):
    limit = server.service.engine.max_model_len
    for size, extra in ((limit - 1, 1), (limit, 0)):
        answer = complete([5] * size, max_tokens=extra)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] == size
    for size, extra in ((limit, 1), (limit + 1, 0), (10 * limit, 0)):
        said = refused(complete([5] * size, max_tokens=extra), "context_length_exceeded")
        assert str(limit) in said
    assert str(limit) in refused(complete("x " * 50_000), "context_length_exceeded", "prompt")


def test_max_tokens_at_the_edge(complete):
    none = complete(max_tokens=0).json()
    assert none["choices"][0]["text"] == "" and none["choices"][0]["finish_reason"] == "length"
    assert none["usage"]["completion_tokens"] == 0
    assert complete(max_tokens=None).json()["usage"]["completion_tokens"] <= 16
    refused(complete(max_tokens=-1), param="max_tokens")
    assert "512" in refused(complete(max_tokens=10**9), "context_length_exceeded", "max_tokens")
    assert refused(complete(max_tokens=10**30), param="max_tokens")


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["x", ""], [[5], []]])
def test_empty_prompts(complete, prompt):
    began = time.monotonic()
    refused(complete(prompt), param="prompt")
    assert time.monotonic() - began < 1.0


@pytest.mark.parametrize("bad", BAD_IDS, ids=str)
def test_a_bad_token_id_is_refused_and_its_neighbour_unchanged(complete, bad):
    for prompt in ([5, bad], [[5, 6], [5, bad]]):
        if prompt == [5, []]:
            continue
        refused(complete(prompt), param="prompt")
    assert complete([[5, 6], [5, 7]]).status_code == 200


@pytest.mark.parametrize("bad", [-1, 2**63, "5", 1.5, True])
def test_bad_numbers_in_other_places(complete, bad):
    for field in ("seed", "n", "max_tokens", "logprobs", "top_k"):
        refused(complete(**{field: bad}), param=field)
    refused(complete(routing={"layers": [bad]}), param="routing")


def test_layers_that_are_not_there(complete):
    assert "last with number 3" in refused(complete(routing={"layers": [4]}), param="routing")
    refused(complete(routing={"layers": [1, 1]}), param="routing")


def test_too_many_of_anything(complete):
    refused(complete(n=65), param="n")
    refused(complete(["x"] * 33, n=2), param="n")
    refused(complete(stop=["x"] * 17), param="stop")
    refused(complete(stop="x" * 257), param="stop")
    refused(complete(stop=""), param="stop")
    refused(complete("x" * (1 << 20)), "body_too_large", status=413)


def test_a_body_without_a_length_is_cut_off_too(client):
    def pieces():
        for _ in range(40):
            yield b"x" * 65536

    answer = client.post("/v1/completions", content=pieces())
    refused(answer, "body_too_large", status=413)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"5", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"model":' * 5000,
     b'{"model": NaN}', b'{"prompt": "\\ud800"}', b"9" * 10_000],
    ids=range(12),
)  # fmt: skip
def test_bodies_that_are_none(client, body):
    refused(client.post("/v1/completions", content=body))
    refused(client.post("/v1/chat/completions", content=body))


def test_half_a_surrogate_is_no_text(client):
    body = json.dumps({"model": NAME, "prompt": "ab\ud800"})
    refused(client.post("/v1/completions", content=body))


def test_fields_that_are_not_computed(complete):
    for field, harmless, harmful in [
        ("echo", False, True),
        ("presence_penalty", 0, 0.5),
        ("logit_bias", {}, {"5": 100}),
        ("best_of", 1, 2),
        ("suffix", None, "end"),
    ]:
        assert complete(**{field: harmless}).status_code == 200
        refused(complete(**{field: harmful}), "unsupported_parameter", field)
    said = refused(complete(zzz_secret="zzz_value"), "unknown_parameter")
    assert "zzz" not in said
    refused(complete(stream_options={"include_usage": True}), param="stream_options")


def test_an_answer_does_not_wait_for_an_acknowledgement(client):
    """Head and body go out at once: otherwise each takes 40 ms, however little there is to do."""
    durations = []
    for _ in range(20):
        began = time.monotonic()
        client.get("/v1/models")
        durations.append(time.monotonic() - began)
    assert min(durations) < 0.02


def test_no_refusal_repeats_what_was_sent(client):
    secret = "attack-at-dawn"
    bodies = [
        {"model": secret, "prompt": "x"},
        {"model": NAME, "prompt": "x", "seed": secret},
        {"model": NAME, "prompt": "x", secret: 1},
        {"model": NAME, "prompt": {"text": secret}},
        {"model": NAME, "prompt": "x", "stop": [secret * 50]},
    ]
    for body in bodies:
        assert secret not in client.post("/v1/completions", json=body).text
    assert secret not in client.get(f"/v1/{secret}").text


def test_more_than_the_queue_holds_is_refused_with_429(make_server):
    import httpx

    server = make_server({"max_running": 1}, limits=Limits(queued=2))
    body = {"model": NAME, "prompt": "x", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    with httpx.Client(base_url=server.url, timeout=30) as client, slowly(server):
        said = refused(
            client.post("/v1/completions", json={**body, "n": 4}), "queue_full", status=429
        )
        assert "2 requests" in said
        with client.stream(
            "POST", "/v1/completions", json={**body, "n": 3, "stream": True}
        ) as held:
            lines = held.iter_lines()  # let go of, it would end the request
            next(lines)
            answer = client.post("/v1/completions", json=body)
            refused(answer, "queue_full", status=429)
            assert answer.headers["retry-after"] == "1"
    assert until(lambda: server.service.loop.books.running == 0)
    books = server.service.loop.books
    assert (books.failed, books.aborted) == (0, 3)
