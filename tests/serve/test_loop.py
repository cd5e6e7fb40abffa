"""When the engine itself fails: callers learn of it, the books add up, and it goes on if it can."""

from __future__ import annotations

import httpx
import pytest

from tests.serve.conftest import NAME, until

BODY = {"model": NAME, "prompt": "Der Server", "max_tokens": 8, "temperature": 0}


@pytest.fixture
def own(apart, make_server):
    server = make_server()
    with httpx.Client(base_url=server.url, timeout=20) as client:
        yield server, client


def boom(value):
    raise RuntimeError("attack at dawn")


def test_a_step_that_fails_costs_its_requests_and_no_others(own):
    server, client = own
    wanted = client.post("/v1/completions", json=BODY).json()["choices"]
    server.service.engine.control.inject("gate.logits", boom, 30.0)
    answer = client.post("/v1/completions", json=BODY)
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "engine_error"
    assert "attack" not in answer.text
    with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]
    assert "engine_error" in lines[-2] and lines[-1] == "data: [DONE]"
    server.service.engine.control.clear("gate.logits")
    assert client.post("/v1/completions", json=BODY).json()["choices"] == wanted
    books, stats = server.service.loop.books, server.service.engine.stats()
    assert (books.failed, books.running) == (2, 0)
    assert stats.num_free_blocks == stats.num_blocks
    assert client.get("/readyz").status_code == 200
    state = client.get("/v1/status").json()
    assert state["log"]["tracebacks"] >= 2 and "attack" not in str(state)


def test_an_engine_that_fails_for_good_is_said_to_be_dead(own, monkeypatch):
    server, client = own
    monkeypatch.setattr(server.service.engine, "step", lambda: boom(None))
    assert until(lambda: client.get("/readyz").status_code == 503)
    assert "has stopped" in client.get("/readyz").json()["reason"]
    answer = client.post("/v1/completions", json=BODY)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_dead"
    assert client.get("/healthz").status_code == 200
