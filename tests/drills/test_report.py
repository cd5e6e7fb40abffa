"""The report: complete, escaped, alone; and the commands that need no running drill."""

from __future__ import annotations

import json
import re

import pytest

from tests.drills.conftest import ALL
from workbench.cli import main
from workbench.drills.rehearsal import rehearse
from workbench.drills.report import page
from workbench.drills.store import Store

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def journal(bench):
    from workbench.drills.files import find
    from workbench.drills.session import Session

    session = Session(find("copies-counted-twice"), bench.deployment, bench.window)
    bench.window.clear()
    rehearse(session)
    return json.loads(json.dumps(session.journal()))


def test_a_page_needs_nothing_else_and_holds_marks_checks_and_proof(journal):
    html = page(journal)
    assert not re.search(r"(src|href)=|https?://|@import|url\(|<script", html)
    (kept,) = (c for c in journal["checks"].values() if c["name"] == "The answers are as before")
    assert f"{100 * kept['value']:.3g} %</td>" in html and "85 % to 100 %" in html
    assert "100 of 100" in html and "prefers-color-scheme: dark" in html
    for check in journal["checks"].values():
        assert check["name"] in html
    for part in journal["result"]["proof"]["hashes"].values():
        assert part["before"] in html


def test_signals_are_drawn_with_the_acts(journal):
    signal = journal["signals"][0]["key"]
    samples = [{"at_s": at, "values": {signal: at / 4}} for at in (0.0, 1.0, 2.0)]
    act = {"at_s": 1.5, "what": "act", "said": "published"}
    html = page(journal | {"samples": samples, "events": [act]})
    assert "class=act" in html and "class=right" in html
    assert html.count("<polyline") == 2, "a curve goes on over an act as if nothing had happened"


def test_text_from_a_journal_is_escaped(journal):
    event = {"at_s": 1.0, "what": "act", "said": HOSTILE}
    briefing = journal["briefing"] | {"title": HOSTILE, "description": HOSTILE}
    html = page(journal | {"events": [event], "briefing": briefing})
    assert HOSTILE not in html and "&lt;script&gt;" in html


def test_a_drill_that_ended_without_result_has_a_page_too(journal):
    html = page({"format": 1, "briefing": journal["briefing"], "reason": "gone", "ended": True})
    assert "gone" in html


def test_list_and_show_give_what_others_lean_on(capfd):
    assert main(["drill", "list", "--json"]) == 0
    listed = json.loads(capfd.readouterr().out)["drills"]
    assert {drill["id"] for drill in listed} == set(ALL)
    assert all(set(d) == {"id", "title", "level", "minutes", "needs"} for d in listed)
    assert main(["drill", "show", "hot-expert", "--json"]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert "cause" not in shown and "solution" not in shown and shown["options"]
    assert main(["drill", "list"]) == 0 and main(["drill", "show", "hot-expert"]) == 0
    assert "One device works" in capfd.readouterr().out


def test_commands_without_a_drill_say_so_in_one_sentence(capfd, tmp_path):
    state = str(tmp_path)
    for words in (["check"], ["hint"], ["observe"], ["finish"], ["act", "publish"]):
        assert main(["drill", *words, "--state", state]) == 1
        assert "no drill is running" in capfd.readouterr().err
    assert main(["drill", "reset", "--state", state]) == 0
    assert main(["drill", "report", "--state", state]) == 1
    assert main(["drill", "show", "nothing"]) == 2


def test_report_writes_the_newest_journal_as_a_page(capfd, tmp_path, journal):
    store = Store.at(tmp_path)
    store.save("1-old", journal | {"briefing": journal["briefing"] | {"title": "old"}})
    store.save("2-new", journal)
    out = tmp_path / "page.html"
    assert main(["drill", "report", "--state", str(tmp_path), "--out", str(out)]) == 0
    assert journal["briefing"]["title"] in out.read_text("utf-8")
    assert main(["drill", "report", "old", "--state", str(tmp_path), "--json"]) == 0
    assert '"old"' in capfd.readouterr().out


@pytest.mark.parametrize("content", ["[]", "{}", '{"briefing": {}}', '{"briefing": 1}', "{"])
def test_a_damaged_journal_is_called_so(capfd, tmp_path, content):
    (tmp_path / "journals").mkdir()
    (tmp_path / "journals" / "a.json").write_text(content)
    assert main(["drill", "report", "--state", str(tmp_path)]) == 1
    said = capfd.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "a.json is damaged" in said.err


def test_a_place_that_cannot_be_written_or_read_is_named_with_its_option(capfd, tmp_path, journal):
    Store.at(tmp_path / "state").save("a", journal)
    words = ["drill", "report", "--state", str(tmp_path / "state"), "--out", str(tmp_path)]
    assert main(words) == 2
    assert f"--out ({tmp_path}) cannot be written" in capfd.readouterr().err
    file = tmp_path / "file"
    file.touch()
    for place in (file, file / "below"):
        for command in (["check"], ["reset"], ["run", "hot-expert"]):
            assert main(["drill", *command, "--state", str(place)]) in (1, 2)
            said = capfd.readouterr()
            assert said.out == "" and said.err.count("\n") == 1 and "--state" in said.err
