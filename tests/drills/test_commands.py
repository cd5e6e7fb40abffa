"""What the commands say of a running drill, which is a stand-in here and answers from memory."""

from __future__ import annotations

import contextlib
import json

import pytest

from engine.errors import MachineError
from engine.runtime.telemetry import Telemetry
from workbench.cli import main
from workbench.drills import client
from workbench.drills.files import find
from workbench.drills.store import Store


class Running:
    """Answers like an incident under way."""

    diagnosis: str | None = None

    def state(self):
        return {"diagnosis": self.diagnosis}

    def finish(self):
        proof = {"restored": True, "hashes": {}}
        return {
            "drill": "half-updated-table", "reason": "finished", "grade": None, "elapsed_s": 1.0,
            "clues": 0, "proof": proof, "solution": "",
        }  # fmt: skip

    def briefing(self):
        called = {"title": "Incident of level 2", "surprise": True}
        return find("half-updated-table").briefing | called


@pytest.fixture
def running(monkeypatch):
    """Let every command join the stand-in."""
    drill = Running()
    monkeypatch.setattr(client, "joined", lambda state=None: contextlib.nullcontext(drill))
    return drill


def test_without_an_id_the_running_drill_is_shown_and_an_incident_keeps_its_name(capfd, running):
    scenario = find("half-updated-table")
    for words in ([], ["--json"]):
        assert main(["drill", "show", *words]) == 0
        said = capfd.readouterr().out
        assert scenario.id not in said and scenario.title not in said
        assert "Incident of level 2" in said and scenario.signals[0].call.name in said
        assert all(option in said for option in scenario.options)
    assert json.loads(said)["description"] == scenario.description


def test_handing_in_without_a_cause_is_warned_of_in_one_line(capfd, running):
    assert main(["drill", "finish"]) == 1
    assert capfd.readouterr().err.startswith("no cause was named")
    running.diagnosis = "torn-table"
    main(["drill", "finish"])
    assert capfd.readouterr().err == ""


def test_while_a_drill_runs_another_is_refused_before_anything_starts(capfd, tmp_path):
    store = Store.at(tmp_path)
    with store.locked():
        for surprise, called in ((False, "the drill hot-expert is"), (True, "an incident is")):
            store.announce({"drill": "hot-expert", "journal": "a", "surprise": surprise})
            assert main(["drill", "run", "stale-plan", "--state", str(tmp_path)]) == 1
            said = capfd.readouterr().err
            assert said.count("\n") == 1 and called in said and "starting" not in said
        store.forget()
        for words in (["run", "stale-plan"], ["observe"]):
            assert main(["drill", *words, "--state", str(tmp_path)]) == 1
            assert "just starting or ending" in capfd.readouterr().err


def test_a_drill_that_has_just_finished_is_called_so(tmp_path):
    stream = Telemetry()  # listens, and sends no frame any more
    try:
        store = Store.at(tmp_path)
        with store.locked():
            facts = {"drill": "hot-expert", "journal": "a", "address": list(stream.address)}
            store.announce(facts | {"key": stream.key.hex()})
            store.save("a", {"briefing": {}, "result": {"reason": "finished"}})
            with pytest.raises(MachineError, match="hot-expert has just finished"):
                client.attach(tmp_path)
    finally:
        stream.close()


def test_a_report_while_another_drill_runs_says_which_it_is_and_writes_beside_json(capfd, tmp_path):
    store, out = Store.at(tmp_path), tmp_path / "page.html"
    briefing = find("hot-expert").briefing
    store.save("a", {"briefing": briefing, "reason": "gone"})
    words = ["drill", "report", "--json", "--out", str(out), "--state", str(tmp_path)]
    with store.locked():
        assert main(words) == 0
    said = capfd.readouterr()
    assert json.loads(said.out)["reason"] == "gone" and "gone" in out.read_text("utf-8")
    assert briefing["title"] in said.err and "still runs" in said.err
    assert main(words) == 0 and "still runs" not in capfd.readouterr().err
