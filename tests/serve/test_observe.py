"""Metrics, state and the dashboard's frames over HTTP."""

from __future__ import annotations

import json
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from engine.runtime.telemetry.wire import Kind, Message, decode, encode
from engine.serve import deploy
from engine.serve.alerts import RULES
from tests.serve.conftest import MODEL, until


def scraped(client) -> dict[str, dict[tuple, float]]:
    """Return samples by name and labels."""
    answer = client.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    found: dict[str, dict[tuple, float]] = {}
    for family in text_string_to_metric_families(answer.text):
        assert family.documentation, family.name
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def difference(after, before, name):
    return {key: value - before.get(name, {}).get(key, 0) for key, value in after[name].items()}


def test_what_a_request_does_is_counted(client, complete):
    before = scraped(client)
    answer = complete([5] * 20, max_tokens=6, ignore_eos=True, routing=True).json()
    after = scraped(client)

    def more(name, labels=()):
        return difference(after, before, f"tokenrouter_{name}")[labels]

    assert more("requests_started_total") == 1
    assert more("requests_ended_total", (("outcome", "finished"),)) == 1
    assert (more("generation_tokens_total"), more("prompt_tokens_total")) == (6, 20)
    assert more("rows_total", (("cause", "accepted"),)) == 25
    assert more("time_to_first_token_seconds_count") == 1
    assert more("time_per_output_token_seconds_count") == 5
    assert more("e2e_request_latency_seconds_count") == 1
    assert 0 < more("routing_seconds_total") < more("step_seconds_total")
    experts = difference(after, before, "tokenrouter_expert_tokens_total")
    counts = answer["choices"][0]["routing"]["summary"]["expert_counts"]
    for layer in range(4):
        for expert in range(8):
            key = (("expert", str(expert)), ("layer", str(layer)))
            assert experts[key] == counts[layer][expert]


def test_the_state_of_the_engine_is_told(client, complete):
    complete()
    now = scraped(client)
    assert now["tokenrouter_num_requests_running"][()] == 0
    assert now["tokenrouter_kv_cache_usage_ratio"][()] == 0
    assert now["tokenrouter_table_version"][()] == 0
    assert now["tokenrouter_table_age_seconds"][()] > 0
    assert now["tokenrouter_rank_up"] == {(("rank", "0"),): 1.0}
    assert now["tokenrouter_rank_memory_bytes"][(("rank", "0"),)] > 50e6
    assert 0 < now["tokenrouter_routing_overhead_ratio"][()] < 1
    definitions = {dict(key)["definition"] for key in now["tokenrouter_load_balance"]}
    assert definitions == {"max_violation", "balancedness"}
    assert set(now["tokenrouter_alert_active"]) == {(("alert", rule.name),) for rule in RULES}
    assert not any(name.startswith("tokenrouter_gpu") for name in now), "absent on a CPU, not zero"


def test_refused_calls_are_counted_by_status(client):
    before = scraped(client)
    assert client.get("/v1/nothing").status_code == 404
    more = difference(scraped(client), before, "tokenrouter_calls_refused_total")
    assert more[(("status", "404"),)] == 1


def test_what_a_caller_breaks_off_is_counted_apart(client):
    from tests.serve.conftest import NAME

    before = scraped(client)
    body = {"model": NAME, "prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    key = (("outcome", "aborted"),)
    assert until(
        lambda: difference(scraped(client), before, "tokenrouter_requests_ended_total")[key] == 1
    )


def test_the_state_adds_up_and_says_nothing_of_the_texts(client, complete):
    complete("attack at dawn")
    state = client.get("/v1/status").json()
    requests = state["requests"]
    assert requests["started"] == sum(
        requests[name] for name in ("finished", "aborted", "failed", "running")
    )
    assert state["ready"] and state["model_shape"]["experts"] == 8
    assert state["log"]["tracebacks"] == 0 and state["communication_errors"] == 0
    assert "attack" not in json.dumps(state)


def socket(server):
    return connect(f"ws://127.0.0.1:{server.listener.port}/v1/telemetry", proxy=None)


def test_the_dashboards_frames_come_over_a_websocket(server, complete):
    with socket(server) as watcher:
        first = decode(watcher.recv(5))
        assert first.kind is Kind.FRAME and first.arrays["total"].shape[1:] == (4, 8)
        watcher.send(encode(Message(Kind.ACK, seq=first.seq))[4:])
        complete("attack at dawn", max_tokens=20)
        until_s, total = time.monotonic() + 5, first.arrays["total"].sum()
        while time.monotonic() < until_s:
            data = watcher.recv(5)
            frame = decode(data)
            assert frame.seq > first.seq and b"attack" not in data
            watcher.send(encode(Message(Kind.ACK, seq=frame.seq))[4:])
            if frame.arrays["total"].sum() > total:
                break
        assert frame.arrays["total"].sum() > total
        assert all(not one["text"] and not one["prompt"] for one in frame.meta["requests"])


def test_a_watcher_that_draws_nothing_gets_few_frames_and_one_that_lies_none(server):
    with socket(server) as watcher:
        began, seen = time.monotonic(), 0
        while time.monotonic() < began + 1.6:
            watcher.recv(5)
            seen += 1
        assert seen <= 5, "one at once, then one each half second"
    with socket(server) as watcher:
        watcher.recv(5)
        watcher.send(b"what?")
        with pytest.raises(ConnectionClosed):
            for _ in range(100):
                watcher.recv(5)


def test_those_who_watch_leave_nothing_in_the_log(server, client):
    before = client.get("/v1/status").json()["log"]["levels"]
    for _ in range(3):
        with socket(server) as watcher:
            watcher.recv(5)
    with socket(server) as watcher:
        watcher.socket.close()
    time.sleep(0.3)
    assert client.get("/v1/status").json()["log"]["levels"] == before


def test_watchers_are_few(server, client):
    from contextlib import ExitStack

    from websockets.exceptions import InvalidStatus

    with ExitStack() as stack:
        for _ in range(16):
            stack.enter_context(socket(server))
        with pytest.raises(InvalidStatus) as refused:
            socket(server)
        assert refused.value.response.status_code == 429
        assert b"too_many_watchers" in refused.value.response.body
    levels = client.get("/v1/status").json()["log"]["levels"]
    assert not {"ERROR", "CRITICAL"} & set(levels), "a refused websocket is no error"


def test_the_files_in_data_deploy_are_what_the_rules_say():
    folder = MODEL.parents[1] / "deploy"
    for name, content in deploy.files().items():
        assert (folder / name).read_text() == content, (
            f"{name} is stale; run python -m engine.serve.deploy data/deploy"
        )


def test_every_metric_of_rules_and_board_is_one_we_have(client, complete):
    import re

    complete()
    known = set(scraped(client))
    known |= {f"tokenrouter_gpu_memory_{part}_bytes" for part in ("total", "free")}
    known |= {"tokenrouter_rank_excess_seconds", "tokenrouter_rank_table_lag"}  # only with ranks
    drafts = ("draft", "accepted")  # only with a draft, see test_draft
    known |= {f"tokenrouter_spec_decode_num_{name}_tokens_total" for name in drafts}
    chosen = ("units", "failed_units")  # only where formats are chosen, see test_formats
    known |= {f"tokenrouter_precision_{name}_total" for name in chosen}
    text = "".join(deploy.files().values())
    named = set(re.findall(r"tokenrouter_[a-z0-9_]+", text))
    assert named and named <= known, named - known
