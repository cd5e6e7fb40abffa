"""A drill on a service that others use: only safe ones, only with the key, always put back."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import threading
import time

import httpx
import pytest

from engine.errors import ConfigError, MachineError, RequestError, RoutingError
from engine.serve.auth import SCOPES, add_key
from tests.drills.test_processes import command, ended, wait_for
from tests.serve.conftest import make_server  # noqa: F401  the fixture
from workbench import drills
from workbench.cli import main
from workbench.drills import on_service
from workbench.drills.checks import FAIL, PASS, grade
from workbench.drills.files import find, scenarios
from workbench.drills.rehearsal import rehearse, ways
from workbench.drills.scenario import REPAIR
from workbench.drills.store import Store

SAFE = {one.id: one for one in scenarios() if one.safe}
EVERYTHING = ("infer", "observe", "operate")


class Target:
    """A service with keys, and what its operator sees of it."""

    def __init__(self, server, folder):
        self.url, self.folder = server.url, folder
        self.control = server.service.engine.control

    def key(self, *scopes):
        return (self.folder / "-".join(scopes)).read_text()

    @property
    def state(self):
        headers = {"Authorization": f"Bearer {self.key(*EVERYTHING)}"}
        return httpx.get(f"{self.url}/v1/control/state", headers=headers).json()["state"]


def served(make_server, folder, **engine):  # noqa: F811
    for scopes in [EVERYTHING, ("operate",), ("infer", "observe"), ("observe", "operate")]:
        name = "-".join(scopes)
        (folder / name).write_text(add_key(folder / "keys", name, scopes))
    assert set(EVERYTHING) == set(SCOPES)
    return Target(make_server(engine, token_file=folder / "keys"), folder)


@pytest.fixture(scope="module")
def shared(make_server, tmp_path_factory):  # noqa: F811
    return served(make_server, tmp_path_factory.mktemp("service"))


@pytest.fixture
def hasty(monkeypatch):
    """Wait for no steps after a change: nothing is asked of the service."""
    monkeypatch.setattr(on_service, "SETTLE_S", 0.0)


@pytest.fixture
def target(shared):
    yield shared
    assert shared.state["drill"] is None and shared.state["faults"] == []


@pytest.fixture(scope="module")
def ranked(make_server, tmp_path_factory):  # noqa: F811
    return served(make_server, tmp_path_factory.mktemp("ranked"), num_ranks=3)


def opened(drill, target, **options):
    return on_service.on_service(find(drill), target.url, target.key(*EVERYTHING), **options)


def test_a_drill_on_a_service_is_measured_repaired_and_put_back_over_http(target, monkeypatch):
    monkeypatch.setattr(on_service, "QUESTIONS", 6)  # a slowed service takes seconds for all
    with opened("lock-contention", target) as session:
        session.prepare()
        assert target.state["faults"] == [] and target.state["drill"] is None
        session.break_it()
        for act, wrong, refusal in [
            ("publish", {}, ConfigError),
            ("stop-job", {"name": "nothing"}, RequestError),
            ("bias", {"expert": 99, "value": 1.0}, RoutingError),
            ("replace-slowest", {}, RequestError),
        ]:
            with pytest.raises(refusal):
                session.act(act, **wrong)
        session.act("smooth", bonus=0.01)
        seen = session.observe()
        assert [signal["outcome"] for signal in seen["signals"]] == [FAIL, FAIL]
        said = str(seen) + str(session.briefing()) + str(session.state())
        for word in ("gate.lock", "slow-gate", session.lease, session.scenario.solution[:20]):
            assert word not in said
        session.check()
        failed = [c.id for c in session.scenario.checks if c.kind == REPAIR]
        assert {session.verdicts[name].outcome for name in failed} == {FAIL}
        assert not grade(session.scenario, "lock", session.verdicts, 1)["passed"]
        session.act("stop-job", name="route-auditor")
        session.act("clear-policy")
        session.diagnose("lock")
        result = session.finish()
    assert {v.outcome for v in session.verdicts.values()} == {PASS}, session.verdicts
    assert result["grade"]["points"] == 100 and result["proof"]["restored"]
    assert set(result["proof"]["hashes"]) == {"weights", "table", "policy", "ranks"}
    assert session.restore() == result["proof"] and target.state["smoothing"] == 0


def test_one_that_is_not_marked_safe_is_refused_before_anything_is_asked():
    nowhere = "http://127.0.0.1:9"
    for drill in ("hot-expert", "rank-killed"):
        with pytest.raises(ConfigError, match="not marked safe.*lock-contention, straggler"):
            drills.start(drill, target=nowhere)
    with pytest.raises(MachineError, match="does not answer"):
        drills.start("straggler", target=nowhere)


@pytest.mark.parametrize(
    ("scopes", "words"),
    [
        ((), "wants a key"),
        (("operate",), "does not let you observe"),
        (("infer", "observe"), "does not let you operate"),
        (("observe", "operate"), "does not let you infer"),
    ],
)
def test_a_key_that_does_not_reach_is_refused(target, tmp_path, scopes, words):
    key = target.key(*scopes) if scopes else None
    with pytest.raises(MachineError, match=words):
        drills.start("lock-contention", target=target.url, key=key, state=tmp_path)
    assert Store.at(tmp_path).current() is None


def test_a_service_under_a_fault_a_drill_or_without_ranks_is_left_alone(target, tmp_path, hasty):
    def refused(drill, words):
        key = target.key(*EVERYTHING)
        with pytest.raises(MachineError, match=words):
            drills.start(drill, target=target.url, key=key, state=tmp_path)

    refused("straggler", "3 ranks or more")
    target.control.inject("experts.compute", lambda value: value, 30.0)
    refused("lock-contention", "under a fault already, at experts.compute")
    target.control.clear("experts.compute")
    with opened("lock-contention", target) as session:
        session.break_it()
        refused("lock-contention", "lock-contention is under way")
        with opened_twice(target) as second, pytest.raises(RoutingError, match="under way"):
            second.break_it()
        assert target.state["drill"], "who came second does not end the first one's drill"


@contextlib.contextmanager
def opened_twice(target):
    """Open a drill as one who looked before the other had begun."""
    check, on_service.Service.check = on_service.Service.check, lambda self, ranks: STATUS
    try:
        with opened("lock-contention", target) as session:
            yield session
    finally:
        on_service.Service.check = check


STATUS = {"ranks": {"living": []}, "totals": {"expert_counts": [[0]]}}


def test_what_is_no_service_of_ours_or_no_address_is_refused(tmp_path):
    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{other.server_address[1]}"
        with pytest.raises(MachineError, match="no service of this workbench"):
            drills.start("straggler", target=url, state=tmp_path)
        other.shutdown()
    for wrong, words in [("here", "must be like"), ("http://a:b@here", "name or a password")]:
        with pytest.raises(ConfigError, match=words):
            drills.start("straggler", target=wrong, state=tmp_path)


def test_a_drill_whose_service_lets_go_of_it_ends_ungraded(target, monkeypatch, hasty):
    monkeypatch.setattr(on_service, "LEASE_S", 0.8)
    with opened("lock-contention", target) as session:
        session.break_it()
        httpx.post(
            f"{target.url}/v1/control/end_drill",
            json={},
            headers={"Authorization": f"Bearer {target.key('operate')}"},
        )
        until = time.monotonic() + 10
        while session.step():
            assert time.monotonic() < until
    assert session.result["reason"].startswith("the service has ended the drill")
    assert session.result["grade"] is None and session.result["proof"]["restored"]


def test_a_drill_on_a_service_lasts_ten_minutes_at_most(target):
    with (
        pytest.raises(ConfigError, match="at most 10"),
        opened("lock-contention", target, minutes=11),
    ):
        pass


WAYS = [(drill, way) for drill, one in SAFE.items() for way in ways(one.safe.scenario)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("drill", "way"), WAYS)
def test_every_way_on_a_service_ends_as_it_must(target, ranked, drill, way):
    one = target if SAFE[drill].safe.ranks == 1 else ranked
    with opened(drill, one) as session:
        result = rehearse(session, way)
    assert result["grade"]["passed"] == result["expected"], (result["grade"], result["checks"])
    assert result["proof"]["restored"] and len(result["symptom"]) == 2
    assert one.state["drill"] is None and one.state["faults"] == []


@contextlib.contextmanager
def runner(target, state):
    """Run the drill as a command until it runs."""
    file = target.folder / "-".join(EVERYTHING)
    words = ("run", "lock-contention", "--json", "--target", target.url, "--key-file", str(file))
    process = command(*words, state=state)
    try:
        while "The drill runs" not in (line := process.stderr.readline()):
            assert line, "the runner has ended"
        yield process, Store.at(state).current(), file
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ctrl_c_puts_the_service_back(target, tmp_path):
    with runner(target, tmp_path) as (process, facts, _):
        assert (tmp_path / "current.json").stat().st_mode & 0o077 == 0
        assert main(["drill", "act", "smooth", "--bonus", "1", "--state", str(tmp_path)]) == 0
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    result = json.loads(out)
    assert process.returncode == 0 and result["proof"]["restored"] and ended(facts), err
    assert "SIGINT" in result["reason"] and result["grade"] is None
    assert (
        target.key(*EVERYTHING)
        not in (tmp_path / "journals").joinpath(os.listdir(tmp_path / "journals")[0]).read_text()
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_service_puts_itself_back_when_everybody_was_killed(target, tmp_path, capfd):
    with runner(target, tmp_path) as (process, facts, file):
        assert main(["drill", "act", "smooth", "--bonus", "1", "--state", str(tmp_path)]) == 0
        os.kill(int(facts["process"].split(":")[0]), signal.SIGKILL)
        process.kill()
        assert target.state["faults"] == ["gate.lock"], "nobody was left to heal it"
        wait_for(lambda: target.state["drill"] is None, on_service.LEASE_S + 5)
    assert target.state["faults"] == [] and target.state["smoothing"] == 0
    capfd.readouterr()
    words = ["drill", "reset", "--json", "--state", str(tmp_path), "--key-file", str(file)]
    assert main(words) == 0
    done = json.loads(capfd.readouterr().out)
    assert done["proof"]["restored"] and "lease" in done["how"]
    assert drills.reset(tmp_path)["found"] is None
