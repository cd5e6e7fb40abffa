"""What the commands say of a running drill, which is a stand-in here and answers from memory."""

from __future__ import annotations

import contextlib
import json

import pytest

from workbench.cli import main
from workbench.drills import client
from workbench.drills.files import find


class Running:
    """Answers like an incident under way."""

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
