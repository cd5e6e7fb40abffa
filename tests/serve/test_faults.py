"""Faults set over HTTP: only those that delay and never falsify, leased and written down."""

from __future__ import annotations

import json
import time

import httpx
import pytest

from engine import SamplingParams
from engine.errors import FaultError
from engine.faults import POINTS, SAFE, Faults
from engine.serve.auth import SCOPES, add_key
from tests.runtime.conftest import make_engine  # noqa: F401  the fixture
from tests.serve.conftest import NAME, until

ACT = "/v1/control/inject_fault"
SLOW = {"fault": "slow-gate", "delay_ms": 20, "lease_s": 30}


@pytest.fixture(scope="module")
def keyed(make_server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    keys = {scope: add_key(folder / "keys", scope, [scope]) for scope in SCOPES}
    server = make_server(token_file=folder / "keys", audit_log=folder / "audit.jsonl")
    return server, keys, folder / "audit.jsonl"


@pytest.fixture
def operate(keyed):
    server, keys, _ = keyed
    headers = {"Authorization": f"Bearer {keys['operate']}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=20) as client:
        yield client
    for point in POINTS:
        server.service.engine.control.clear(point)


def faults(operate):
    return operate.get("/v1/control/state").json()["state"]["faults"]


def test_a_fault_slows_answers_until_its_lease_is_over(keyed, operate):
    server, keys, log = keyed

    def seconds():
        began = time.monotonic()
        body = {"model": NAME, "prompt": [5, 6], "max_tokens": 2, "temperature": 0}
        headers = {"Authorization": f"Bearer {keys['infer']}"}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=20)
        return answer.json()["choices"][0]["text"], time.monotonic() - began

    text, _ = seconds()
    answer = operate.post(ACT, json=SLOW | {"delay_ms": 50, "lease_s": 0.8})
    assert answer.json()["state"]["faults"] == ["gate.lock"]
    slow_text, slow_s = seconds()
    assert slow_s > 8 * 0.05 and slow_text == text
    assert until(lambda: faults(operate) == [], 3.0)
    line = next(json.loads(x) for x in log.read_text().splitlines() if "inject_fault" in x)
    assert line["key"] == "operate" and line["outcome"] == "200"
    assert line["detail"] == "fault=slow-gate delay_ms=50.0 lease_s=0.8"


def test_a_fault_can_be_healed_before_its_lease_is_over(operate):
    assert operate.post(ACT, json=SLOW).status_code == 200
    assert faults(operate) == ["gate.lock"]
    operate.post("/v1/control/clear_fault", json={"point": "gate.lock"})
    assert faults(operate) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"fault": "gate.logits"},
        {"fault": "table.unsafe_publish"},
        {"fault": "weights.load"},
        {"delay_ms": 0},
        {"delay_ms": 1e9},
        {"delay_ms": 51},
        {"lease_s": 0},
        {"lease_s": 601},
        {"lease_s": None},
        {"rank": 1},
        {"rank": -1},
        {"more": 1},
    ],
    ids=str,
)
def test_what_is_not_safe_or_out_of_bounds_is_refused_and_sets_nothing(operate, wrong):
    assert operate.post(ACT, json=SLOW | wrong).status_code in (400, 409)
    assert faults(operate) == []


def test_only_operators_may_break_anything(keyed):
    server, keys, _ = keyed
    for scope, status in [("infer", 403), ("observe", 403), (None, 401)]:
        headers = {"Authorization": f"Bearer {keys[scope]}"} if scope else {}
        answer = httpx.post(f"{server.url}{ACT}", json=SLOW, headers=headers)
        assert answer.status_code == status


def test_no_safe_fault_changes_an_answer(make_engine):  # noqa: F811
    engine = make_engine(deterministic=True, hash_logits=True)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    known = engine.generate([[5, 6, 7]], params)[0].logits_sha256
    for fault in SAFE.values():
        engine.control.inject(fault.point, fault.of(1.0), 60)
    assert engine.generate([[5, 6, 7]], params)[0].logits_sha256 == known
    table = engine.table
    engine.control.publish_table(table.moved(table.rank_of_phy))
    assert engine.generate([[5, 6, 7]], params)[0].logits_sha256 == known


@pytest.mark.parametrize("fault", SAFE.values(), ids=SAFE)
def test_every_safe_fault_has_a_point_and_bounds(fault):
    Faults().set(fault.point, fault.of(fault.most_ms))
    for delay_ms in (0, -1, fault.most_ms + 1, float("nan")):
        with pytest.raises(FaultError, match="delay_ms"):
            fault.of(delay_ms)
