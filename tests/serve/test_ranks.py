"""A service on ranks: one is killed, the service says so, answers go on, and it is scaled."""

from __future__ import annotations

import os
import signal
import threading

import httpx
import pytest

from engine.serve.auth import add_key
from tests.serve.conftest import NAME, until
from workbench.remote import KEY_VARIABLE


@pytest.fixture(scope="module")
def ranked(make_server, tmp_path_factory):
    file = tmp_path_factory.mktemp("ranked") / "keys.json"
    key = add_key(file, "all", ["infer", "observe", "operate"])
    engine = {"num_ranks": 2, "deterministic": True, "hash_logits": True}
    server = make_server(engine, token_file=file, first_ranks=1)
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        yield server, client, key


def ready(client):
    answer = client.get("/readyz")
    return answer.status_code == 200, answer.json()["reason"]


def completed(client, **options):
    body = {"model": NAME, "prompt": "Der Server", "max_tokens": 24, "temperature": 0,
            "ignore_eos": True, **options}  # fmt: skip
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def test_a_rank_comes_and_goes_while_requests_run(ranked, workbench, monkeypatch):
    server, client, key = ranked
    assert ready(client) == (True, None), "fewer ranks on purpose is no fault"
    alone = completed(client)
    monkeypatch.setenv(KEY_VARIABLE, key)
    ended, answers = threading.Event(), []

    def ask():
        while not ended.is_set():
            answers.append(completed(client))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        up = workbench("scale", server.url, "--ranks", "2", "--json").json
        assert (up["before"], up["ranks"]) == ([0], [0, 1])
        down = workbench("scale", server.url, "--ranks", "1", "--json").json
        assert (down["before"], down["ranks"]) == ([0, 1], [0])
    finally:
        ended.set()
        asking.join(60)
    assert answers
    assert {one["logits_sha256"] for one in answers} == {alone["logits_sha256"]}
    workbench("scale", server.url, "--ranks", "3").assert_refused(1, "places for 2 ranks")
    monkeypatch.setenv(KEY_VARIABLE, "trw_all_wrong")
    workbench("scale", server.url, "--ranks", "1").assert_refused(1, "valid key")


def test_a_killed_rank_makes_it_not_ready_and_answers_go_on(ranked):
    server, client, _ = ranked
    assert client.post("/v1/control/scale", json={"ranks": 2}).status_code == 200
    alone = completed(client)
    os.kill(server.service.engine.ranks[1], signal.SIGKILL)
    assert until(lambda: not ready(client)[0])
    assert "rank 1" in ready(client)[1]
    assert completed(client)["logits_sha256"] == alone["logits_sha256"]
    assert until(lambda: "killed by signal 9" in ready(client)[1])
    assert until(
        lambda: "RankSilent" in {a["name"] for a in client.get("/v1/status").json()["alerts"]}
    )
    text = client.get("/metrics").text
    assert 'tokenrouter_rank_up{rank="1"} 0.0' in text
    assert "tokenrouter_communication_errors_total 0.0" not in text
    assert client.post("/v1/control/scale", json={"ranks": 2}).status_code == 200
    assert until(lambda: ready(client)[0], 5)
    assert completed(client)["logits_sha256"] == alone["logits_sha256"]


@pytest.mark.parametrize(
    ("action", "body", "status"),
    [
        ("ban_expert", {"expert": 0}, 200),
        ("ban_expert", {"expert": 8}, 409),
        ("ban_expert", {"expert": True}, 400),
        ("ban_expert", {"expert": 0, "layer": 9}, 400),
        ("force_experts", {"experts": [1], "layer": 2}, 200),
        ("set_bias", {"expert": 1, "value": 0.5, "layer": 1}, 200),
        ("set_bias", {"expert": 1, "value": 1e9}, 400),
        ("set_smoothing", {"bonus": 0.5, "window": 4, "decay": 0.7}, 200),
        ("set_precision", {"mode": "int8"}, 409),
        ("set_capacity", {"factor": 1.5}, 409),  # which is refused in deterministic mode
        ("set_capacity", {"factor": None}, 200),
        ("set_capacity", {"factor": 0.5}, 400),
        ("clear_fault", {"point": "gate.logits"}, 200),
        ("clear_fault", {"point": "secret"}, 400),
        ("set_exchange", {"mode": "naive"}, 200),
        ("set_exchange", {"mode": "grouped"}, 200),
        ("drain_rank", {"rank": 5}, 409),
        ("rebalance", {}, 200),
        ("clear_policy", {"expert": 1}, 400),
        ("clear_policy", None, 200),
        ("state", {}, 405),
        ("nothing", {}, 404),
    ],
)
def test_operators_acts(ranked, action, body, status):
    _, client, _ = ranked
    answer = client.post(f"/v1/control/{action}", json=body)
    assert answer.status_code == status, answer.text
    assert "secret" not in answer.text


def test_what_operators_do_is_in_force(ranked):
    _, client, _ = ranked
    for layer in range(4):
        client.post("/v1/control/ban_expert", json={"expert": 3, "layer": layer})
    state = client.get("/v1/control/state").json()["state"]
    assert len(state["banned"]) == 4
    told = completed(client, routing=True)["routing"]["summary"]["expert_counts"]
    assert [counts[3] for counts in told] == [0] * 4
    client.post("/v1/control/clear_policy")
    assert client.get("/v1/control/state").json()["state"]["banned"] == []


def test_orders_of_a_scale():
    from engine.serve.control import scale_orders

    every = frozenset
    assert scale_orders(every({0, 1, 2}), every({0, 2}), 2, 4) == [("drain", 1)]
    assert scale_orders(every({0, 2}), every({0, 2}), 3, 4) == [("add", 1)]
    assert scale_orders(every({0, 1, 2, 3}), every({0, 2, 3}), 4, 4) == [("add", 1)]
    assert scale_orders(every({0, 1, 2, 3}), every({0, 1, 2, 3}), 2, 4) == [
        ("drain", 3),
        ("drain", 2),
    ]
    assert scale_orders(every({0, 1}), every({0, 1}), 2, 4) == []
