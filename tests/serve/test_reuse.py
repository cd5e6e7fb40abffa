"""Prefix reuse and priorities as callers see them."""

from __future__ import annotations

import httpx
import numpy as np
import pytest

from engine.serve.encodings import from_int32, from_npy
from tests.serve.conftest import NAME, slowly, until
from workbench.acceptance.expectations import NotAcceptedError
from workbench.acceptance.format import check_routing

PROMPT = list(range(100, 140))
"""Two full blocks of 16 and eight tokens."""


@pytest.fixture(scope="module")
def reusing(make_server):
    return make_server({"prefix_reuse": True, "max_running": 1})


@pytest.fixture(scope="module")
def ask(reusing):
    with httpx.Client(base_url=reusing.url, timeout=30) as client:

        def post(**options):
            body = {"model": NAME, "prompt": PROMPT, "max_tokens": 4, "temperature": 0, **options}
            return client.post("/v1/completions", json=body)

        yield post


def test_reused_tokens_are_counted_and_said_not_to_have_been_routed(ask, reusing):
    before = reusing.service.engine.stats().prefix_queries
    first, second = (ask(routing={"encodings": True}).json() for _ in range(2))
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (first, second)]
    assert cached == [0, 32]
    whole, told = (answer["choices"][0]["routing"] for answer in (first, second))
    assert "note" not in whole and whole["summary"]["reused_rows"] == 0
    assert "32 prompt tokens were not computed" in told["note"]
    assert told["summary"]["reused_rows"] == 32 and told["summary"]["rows"] == 11
    shape = {"experts": 8, "moe_layers": [0, 1, 2, 3]}
    for answer, routing in ((first, whole), (second, told)):
        assert check_routing(routing, answer["usage"], shape)["rows"] == 43
    lying = told | {"summary": told["summary"] | {"reused_rows": 31}}
    with pytest.raises(NotAcceptedError):
        check_routing(lying, second["usage"], shape)
    for index, (a, b) in enumerate(zip(whole["tokens"], told["tokens"], strict=True)):
        assert (b["index"], b["id"]) == (a["index"], a["id"]) == (index, a["id"])
        assert b["experts"] == (None if index < 32 else a["experts"])
    for decode in (lambda e: from_npy(e["npy"]), lambda e: from_int32(e["int32"], 4, 2)):
        ids, known = decode(told["encodings"]), decode(whole["encodings"])
        assert (ids[:32] == -1).all()
        np.testing.assert_array_equal(ids[32:], known[32:])
    metrics = httpx.get(f"{reusing.url}/metrics").text
    assert f"tokenrouter_prefix_cache_queries_total {before + 80:.1f}" in metrics
    assert "tokenrouter_prefix_cache_hits_total 32.0" in metrics
    assert "tokenrouter_prefix_cache_kept_ratio" in metrics


def test_a_stream_counts_reused_tokens_in_its_usage(ask):
    body = {"stream": True, "stream_options": {"include_usage": True}}
    last = [line for line in ask(**body).text.splitlines() if line][-2]
    assert '"cached_tokens":32' in last.replace(" ", "")


@pytest.mark.parametrize("priority", [101, -101, 0.5, "1", True])
def test_a_bad_priority_is_refused_by_name(ask, priority):
    refused = ask(priority=priority)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "priority"


def test_an_urgent_call_overtakes(ask, reusing):
    from concurrent.futures import ThreadPoolExecutor

    ended = []

    def call(priority):
        assert ask(priority=priority, max_tokens=3, ignore_eos=True).status_code == 200
        ended.append(priority)

    books = reusing.service.loop.books
    with slowly(reusing), ThreadPoolExecutor(3) as pool:
        for count, priority in enumerate((0, 3, -3), 1):
            pool.submit(call, priority)
            assert until(lambda count=count: books.running == count)
    assert ended == [-3, 0, 3]
