"""The drill's process: reached from elsewhere, and never left behind, however its runner ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from engine.errors import ConfigError, MachineError, RequestError
from tests.drills.conftest import ALL
from workbench import drills, paths
from workbench.cli import main
from workbench.drills.client import READY_S
from workbench.drills.files import find
from workbench.drills.leftovers import clean
from workbench.drills.opening import fresh_hashes
from workbench.drills.store import Store
from workbench.drills.words import debrief_text

ROOT = Path(__file__).parents[2]


def command(*words, state, **more):
    line = [sys.executable, "-m", "workbench", "drill", *words, "--state", str(state)]
    return subprocess.Popen(
        line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more
    )


def said(*words, state):
    process = command(*words, state=state)
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


def wait_for(truth, seconds=100):
    until = time.monotonic() + seconds
    while not truth():
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.1)


@contextlib.contextmanager
def runner(drill, state):
    """Run `workbench drill run` until its drill has announced itself."""
    process = command("run", drill, "--json", state=state)
    store = Store.at(state)
    try:
        wait_for(lambda: store.current() is not None or process.poll() is not None, READY_S)
        facts = store.current()
        assert facts is not None, process.communicate()
        while "The drill runs" not in (line := process.stderr.readline()):
            assert line, "the runner has ended"
        yield process, facts
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def ended(facts):
    pid = int(facts["process"].split(":")[0])
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_a_drill_is_worked_on_from_a_second_terminal_and_ctrl_c_restores(tmp_path):
    with runner("half-updated-table", tmp_path) as (process, facts):
        assert (tmp_path / "current.json").stat().st_mode & 0o077 == 0
        with drills.attach(tmp_path) as drill:
            assert drill.briefing()["id"] == drill.id == "half-updated-table"
            seen = drill.observe()
            assert {s["outcome"] for s in seen["signals"]} == {"fail"}
            assert drill.hint()["number"] == 1
            with pytest.raises(RequestError, match="did you mean 'publish'"):
                drill.act("publsh")
            state = drill.state()
            assert state["phase"] == "running" and state["clues"] == 1
        code, out, err = said("act", "publish", state=tmp_path)
        assert code == 0 and "table version" in out, err
        code, out, err = said("check", "--json", state=tmp_path)
        found = json.loads(out)["checks"]
        assert code == 0 and {check["outcome"] for check in found.values()} == {"pass"}, err
        refused = said("run", "hot-expert", state=tmp_path)
        assert refused[0] == 1 and "is running" in refused[2]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    result = json.loads(out)
    assert process.returncode == 0, err
    assert result["proof"]["restored"] and "SIGINT" in result["reason"] and not result["grade"]
    assert ended(facts) and Store.at(tmp_path).current() is None
    _, journal = Store.at(tmp_path).read()
    assert [e["act"] for e in journal["events"] if e["what"] == "act"] == ["publish"]


NOTHING = {"found": None, "how": "no drill was running", "proof": None}


def assert_restored(proof, facts):
    """Check that every hash from before the drill, as announced then, is the one after it."""
    assert proof["restored"]
    assert set(proof["hashes"]) == {"weights", "table", "policy", "ranks", "options"}
    for name, part in proof["hashes"].items():
        assert part["before"] == part["after"] == facts["hashes"][name] and len(part["after"]) == 64


@pytest.mark.timeout(600)
def test_killing_the_runner_restores_the_engine_and_ends_it(tmp_path, capfd):
    with runner("small-batches", tmp_path) as (process, facts):
        assert main(["drill", "act", "smooth", "--bonus", "2", "--state", str(tmp_path)]) == 0
        assert main(["drill", "act", "smooth", "--bonus", "nan", "--state", str(tmp_path)]) == 2
        assert main(["drill", "debrief", "--state", str(tmp_path)]) == 1
        said = capfd.readouterr().err
        assert "nan and inf are not" in said and "the drill still runs" in said
        process.kill()
        wait_for(lambda: ended(facts) and not Store.at(tmp_path).busy, 60)
    with pytest.raises(MachineError, match="no drill is running"):
        drills.attach(tmp_path)
    capfd.readouterr()
    assert main(["drill", "reset", "--json", "--state", str(tmp_path)]) == 0
    done = json.loads(capfd.readouterr().out)
    assert done["found"] == "small-batches" and "its runner has gone" in done["how"]
    assert_restored(done["proof"], facts)
    assert drills.reset(tmp_path) == NOTHING
    _, journal = Store.at(tmp_path).read()
    assert [event["act"] for event in journal["events"] if event["what"] == "act"] == ["smooth"]
    assert journal["result"]["proof"] == done["proof"] and journal["result"]["grade"] is None


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.parametrize("drill", ALL)
def test_ctrl_c_in_the_middle_restores_any_drill(tmp_path, drill):
    with runner(drill, tmp_path) as (process, facts):
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert json.loads(out)["proof"]["restored"] and ended(facts), err


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.parametrize("drill", ALL)
def test_killing_the_runner_of_any_drill_leaves_nothing_behind(tmp_path, drill):
    with runner(drill, tmp_path) as (process, facts):
        pid = int(facts["process"].split(":")[0])
        others = [child.pid for child in psutil.Process(pid).children(recursive=True)]
        process.kill()
        wait_for(lambda: ended(facts) and not Store.at(tmp_path).busy, 120)
    wait_for(lambda: not any(map(psutil.pid_exists, others)), 20)
    done = drills.reset(tmp_path)
    assert done["proof"]["restored"] and "its runner has gone" in done["how"]


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_an_incident_keeps_its_title_back_and_shows_who_did_what(tmp_path, monkeypatch):
    with drills.start("half-updated-table", state=tmp_path, surprise=True, who="ann") as drill:
        assert drill.briefing()["title"] == drill.state()["title"] == "Incident of level 2"
        with drills.attach(tmp_path, "ben") as other:
            other.remark("the hashes differ")
            other.act("publish")
        drill.diagnose("torn-table")
        assert drill.state()["remarks"][0]["who"] == "ben"
        assert drill.finish()["grade"]["passed"]
        text = debrief_text(drill.journal())
    assert "ben: remark the hashes differ" in text and "ann: diagnosis torn-table" in text
    assert "Worse answers since the migration: who did what" in text and "ann, ben" in text


@pytest.mark.slow
def test_when_the_engine_is_killed_too_a_fresh_one_is_as_the_first_was(tmp_path):
    with runner("half-updated-table", tmp_path) as (process, facts):
        os.kill(int(facts["process"].split(":")[0]), signal.SIGKILL)
        process.kill()
        wait_for(lambda: ended(facts) and not Store.at(tmp_path).busy, 60)
    code, out, err = said("reset", "--json", state=tmp_path)
    done = json.loads(out)
    assert code == 0 and done["found"] == "half-updated-table" and "has gone" in done["how"], err
    assert_restored(done["proof"], facts)
    assert drills.reset(tmp_path) == NOTHING
    assert Store.at(tmp_path).read()[1]["ended"]
    code, out, _ = said("report", state=tmp_path)
    assert code == 0 and "has gone" in Path(out.strip()).read_text("utf-8")


@pytest.mark.slow
def test_a_fresh_engine_that_is_not_as_the_first_is_called_so(tmp_path):
    store = Store.at(tmp_path)
    facts = {"drill": "hot-expert", "journal": "a", "model": paths.DEFAULT_MODEL}
    hashes = fresh_hashes(find("hot-expert"), paths.DEFAULT_MODEL)
    for wrong in hashes:
        store.announce(facts | {"hashes": hashes | {wrong: "0" * 64}})
        proof = drills.reset(tmp_path)["proof"]
        unequal = [name for name, part in proof["hashes"].items() if not part["equal"]]
        assert not proof["restored"] and unequal == [wrong]
    store.announce(facts | {"hashes": hashes, "model": str(tmp_path / "moved")})
    assert drills.reset(tmp_path)["proof"] is None


@pytest.mark.slow
def test_reset_restores_a_living_drill_and_proves_it(tmp_path):
    with runner("hot-expert", tmp_path) as (_process, facts):
        done = drills.reset(tmp_path)
        assert done["found"] == "hot-expert" and done["how"] == "restored and ended"
        assert_restored(done["proof"], facts)
        wait_for(lambda: ended(facts), 20)
    assert drills.reset(tmp_path) == NOTHING


@pytest.mark.slow
def test_reset_ends_a_drill_that_does_not_answer(tmp_path):
    with runner("hot-expert", tmp_path) as (_process, facts):
        os.kill(int(facts["process"].split(":")[0]), signal.SIGSTOP)
        done = drills.reset(tmp_path)
        assert done["found"] == "hot-expert" and "did not answer" in done["how"]
        assert_restored(done["proof"], facts)
        wait_for(lambda: ended(facts), 20)
    assert drills.reset(tmp_path) == NOTHING


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_to_the_runner_restore_as_well(tmp_path, number):
    with runner("routing-jitter", tmp_path) as (process, facts):
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)
    assert json.loads(out)["proof"]["restored"] and ended(facts)


@pytest.mark.slow
def test_a_signal_while_the_drill_starts_leaves_nothing(tmp_path):
    process = command("run", "routing-jitter", "--json", state=tmp_path)
    wait_for(lambda: Store.at(tmp_path).busy)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    wait_for(lambda: not Store.at(tmp_path).busy, 20)
    assert Store.at(tmp_path).current() is None


@pytest.mark.slow
def test_a_signal_to_the_drills_own_process_restores_too(tmp_path):
    with runner("hot-expert", tmp_path) as (process, facts):
        os.kill(int(facts["process"].split(":")[0]), signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    assert json.loads(out)["proof"]["restored"] and "SIGTERM" in json.loads(out)["reason"]


@pytest.mark.slow
def test_the_lease_ends_a_forgotten_drill(tmp_path):
    with drills.start("half-updated-table", state=tmp_path, minutes=0.05) as drill:
        wait_for(lambda: not drill.running, 60)
        result = drill.journal()["result"]
    assert result["reason"] == "the time is up" and result["proof"]["restored"]


@pytest.mark.slow
def test_a_drill_is_passed_through_the_python_interface(tmp_path):
    with drills.start("routing-jitter", state=tmp_path) as drill:
        drill.act("smooth", bonus=1.2)
        drill.diagnose("restless-gate")
        result = drill.finish()
    assert result["grade"]["passed"], result
    assert result["proof"]["restored"] and Store.at(tmp_path).current() is None


def test_what_a_dead_drill_left_is_cleared_and_a_running_one_is_not(tmp_path):
    store = Store.at(tmp_path)
    assert not clean(store)
    with store.locked():
        store.announce({"drill": "hot-expert", "journal": "a"})
        assert not clean(store) and store.current()
        with pytest.raises(MachineError, match="hot-expert is running"), store.locked():
            pass
    assert not store.busy and store.current()
    assert clean(store) and not clean(store)
    assert store.current() is None
    assert store.read("a")[1]["ended"]


DAMAGED = {
    "half a file": '{"drill": "hot',
    "nothing in it": "{}",
    "a list": "[]",
    "a drill that is gone": '{"drill": "no-such-drill", "journal": "a"}',
    "a journal elsewhere": '{"drill": "hot-expert", "journal": "../../evil"}',
    "a drill that is a number": '{"drill": 5, "journal": "a"}',
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_state_is_set_aside_by_reset_and_said(tmp_path, capfd, content):
    folder = tmp_path / "one" / "two"
    store = Store.at(folder)
    folder.mkdir(parents=True)
    (folder / "current.json").write_text(content)
    assert store.current() is None and store.damaged
    with pytest.raises(MachineError, match="no drill is running"):
        drills.attach(folder)
    assert main(["drill", "reset", "--state", str(folder)]) == 1
    (aside,) = folder.glob("current.json.damaged-*")
    assert aside.read_text() == content and str(aside) in capfd.readouterr().out
    assert drills.reset(folder) == NOTHING and not store.damaged
    assert not list(tmp_path.rglob("evil*"))
    with pytest.raises(MachineError, match="no journal"):
        store.read()
    with pytest.raises(ConfigError, match="plain file name"):
        store.save("../../evil", {})


def test_a_damaged_state_does_not_stop_the_next_drill(tmp_path):
    store = Store.at(tmp_path)
    (tmp_path / "current.json").write_text("{}")
    assert clean(store) and not clean(store)


def test_a_damaged_state_of_a_running_drill_says_how_to_end_it(tmp_path):
    store = Store.at(tmp_path)
    with store.locked():
        for content in ("{}", '{"drill": "hot-expert", "journal": "a", "address": 5}'):
            (tmp_path / "current.json").write_text(content)
            with pytest.raises(MachineError, match="Ctrl-C in its own terminal"):
                drills.attach(tmp_path)
        (tmp_path / "current.json").write_text("{}")
        with pytest.raises(MachineError, match="Ctrl-C in its own terminal"):
            drills.reset(tmp_path)
        assert (tmp_path / "current.json").exists()


def test_what_a_drill_left_without_hashes_is_cleared_unproven(tmp_path):
    store = Store.at(tmp_path)
    store.announce({"drill": "hot-expert", "journal": "a"})
    (tmp_path / "journals").mkdir()
    (tmp_path / "journals" / "a.json").write_text("[]")
    done = drills.reset(tmp_path)
    assert done["found"] == "hot-expert" and done["proof"] is None
    assert list((tmp_path / "journals").glob("a.json.damaged-*"))
    assert drills.reset(tmp_path) == NOTHING


def test_bad_requests_are_refused_before_a_process_is_started(tmp_path, capfd):
    for minutes in ("0", "nan", "121"):
        words = ["drill", "run", "hot-expert", "--minutes", minutes, "--state", str(tmp_path)]
        assert main(words) == 2 and "above 0 and at most 120" in capfd.readouterr().err
    with pytest.raises(ConfigError, match="did you mean"):
        drills.start("hot-exprt", state=tmp_path)
    assert not (tmp_path / "current.json").exists()
