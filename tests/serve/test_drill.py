"""A service held for a drill: one at a time, on a lease, and put back whatever was done to it."""

from __future__ import annotations

import contextlib
import json

import httpx
import pytest

from engine.faults import POINTS
from engine.serve.auth import SCOPES, add_key
from tests.serve.conftest import until

BEGIN = {"drill": "lock-contention", "fault": "slow-gate", "delay_ms": 5, "lease_s": 30}


class Operator:
    """Acts and reads as an operator does."""

    def __init__(self, server, keys, client):
        self.server, self.keys, self.client = server, keys, client

    def post(self, act, scope="operate", **body):
        headers = {"Authorization": f"Bearer {self.keys[scope]}"}
        return self.client.post(f"/v1/control/{act}", json=body, headers=headers)

    def done(self, act, **body):
        answer = self.post(act, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    @property
    def state(self):
        headers = {"Authorization": f"Bearer {self.keys['operate']}"}
        return self.client.get("/v1/control/state", headers=headers).json()["state"]

    @property
    def status(self):
        headers = {"Authorization": f"Bearer {self.keys['observe']}"}
        return self.client.get("/v1/status", headers=headers).json()


@contextlib.contextmanager
def keyed(make_server, folder, **options):
    keys = {scope: add_key(folder / "keys", scope, [scope]) for scope in SCOPES}
    server = make_server(token_file=folder / "keys", audit_log=folder / "audit", **options)
    with httpx.Client(base_url=server.url, timeout=90) as client:
        yield Operator(server, keys, client)


@pytest.fixture(scope="module")
def shared(make_server, tmp_path_factory):
    folder = tmp_path_factory.mktemp("drill")
    with keyed(make_server, folder) as operator:
        yield operator, folder / "audit"


@pytest.fixture
def operator(shared):
    one = shared[0]
    yield one
    if one.state["drill"]:
        one.done("end_drill")
    for point in POINTS:
        one.server.service.engine.control.clear(point)
    one.done("clear_policy")


def test_a_drill_holds_the_service_until_it_is_ended_and_all_is_put_back(operator, shared):
    before = operator.state
    begun = operator.done("begin_drill", **BEGIN)
    assert operator.state["faults"] == ["gate.lock"]
    assert operator.status["drill"]["drill"] == "lock-contention"
    assert 0 < operator.status["drill"]["left_s"] <= 30
    for scope in ("infer", "observe"):
        assert operator.post("begin_drill", scope, **BEGIN).status_code == 403
    for act in ("begin_drill", "inject_fault"):
        body = BEGIN if act == "begin_drill" else {k: v for k, v in BEGIN.items() if k != "drill"}
        refused = operator.post(act, **body)
        assert refused.status_code == 409 and "lock-contention is under way" in refused.text
    operator.done("set_smoothing", bonus=1.0)
    operator.done("rebalance")
    assert operator.done("extend_drill", lease=begun["lease"], lease_s=20)["left_s"] == 20
    ended = operator.done("end_drill", lease=begun["lease"])
    assert ended["restored"] and ended["before"] == ended["after"] == begun["hashes"]
    assert set(ended["before"]) == {"weights", "table", "policy", "ranks"}
    after = operator.state
    assert after["faults"] == [] and after["drill"] is None
    assert after["smoothing"] == before["smoothing"]
    assert operator.done("end_drill", lease=begun["lease"]) == ended, "ending again does no harm"
    lines = [json.loads(line) for line in shared[1].read_text().splitlines()]
    said = [line["detail"] for line in lines if "begin_drill" in line["operation"]]
    assert any("drill=lock-contention" in detail for detail in said)
    assert begun["lease"] not in shared[1].read_text(), "a lease is no word for the log"


def test_a_drill_whose_runner_is_silent_is_put_back_by_the_service(operator):
    begun = operator.done("begin_drill", **BEGIN | {"lease_s": 0.6})
    operator.done("set_smoothing", bonus=1.0)
    assert until(lambda: operator.state["drill"] is None, 5.0)
    assert operator.state["faults"] == [] and operator.state["smoothing"] == 0
    ended = operator.done("end_drill", lease=begun["lease"])
    assert ended["restored"] and ended["how"] == "its lease was over"
    late = operator.post("extend_drill", lease=begun["lease"], lease_s=5)
    assert late.status_code == 409 and operator.state["faults"] == []


def test_what_was_not_put_back_is_not_called_restored(operator, monkeypatch):
    begun = operator.done("begin_drill", **BEGIN)
    control = operator.server.service.engine.control
    monkeypatch.setattr(control, "set_policy", lambda policy: None)
    operator.done("set_smoothing", bonus=1.0)
    ended = operator.done("end_drill", lease=begun["lease"])
    assert not ended["restored"] and ended["before"]["policy"] != ended["after"]["policy"]


def test_any_operator_may_end_a_drill_without_knowing_its_lease(operator):
    operator.done("begin_drill", **BEGIN)
    wrong = operator.post("end_drill", lease="0" * 32)
    assert wrong.status_code == 409 and operator.state["drill"]
    assert operator.done("end_drill")["how"] == "ended by an operator"
    assert operator.state["drill"] is None


def test_a_service_under_a_fault_is_left_alone(operator):
    operator.done("inject_fault", fault="slow-experts", delay_ms=1, lease_s=30)
    refused = operator.post("begin_drill", **BEGIN)
    assert refused.status_code == 409 and "experts.compute" in refused.json()["error"]["message"]
    assert operator.state["faults"] == ["experts.compute"] and operator.state["drill"] is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"fault": "gate.logits"},
        {"fault": "table.unsafe_publish"},
        {"delay_ms": 51},
        {"delay_ms": 0},
        {"lease_s": 61},
        {"lease_s": 0},
        {"rank": 0},
        {"drill": "../x"},
        {"drill": "x" * 65},
        {"drill": ""},
        {"lease": "0" * 32},
        {"more": 1},
    ],
    ids=str,
)
def test_what_is_not_safe_or_out_of_bounds_holds_nothing(operator, wrong):
    refused = operator.post("begin_drill", **BEGIN | wrong)
    assert refused.status_code in (400, 409) and "lock-contention" not in refused.text
    assert operator.state["faults"] == [] and operator.state["drill"] is None


def test_a_service_that_is_ending_is_not_held(operator):
    health = operator.server.service.health
    health._draining = True
    try:
        refused = operator.post("begin_drill", **BEGIN)
    finally:
        health._draining = False
    assert refused.status_code == 409 and "draining" in refused.text


@pytest.mark.slow
def test_ranks_exchange_and_table_are_put_back(make_server, tmp_path):
    with keyed(make_server, tmp_path, engine={"num_ranks": 3}) as operator:
        asked = {"drill": "straggler", "fault": "slow-experts", "delay_ms": 5, "lease_s": 60}
        gone = operator.post("begin_drill", **asked, rank=7)
        assert gone.status_code == 409 and "does not take part" in gone.text
        begun = operator.done("begin_drill", **asked, rank=1)
        operator.done("set_exchange", mode="naive")
        operator.done("drain_rank", rank=1)
        assert until(lambda: operator.status["ranks"]["living"] == [0, 2], 20)
        ended = operator.done("end_drill", lease=begun["lease"])
        assert ended["restored"], ended
        assert operator.status["ranks"]["living"] == [0, 1, 2] and operator.state["faults"] == []
