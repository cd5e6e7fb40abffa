"""`workbench trace`: records real runs, describes files, and refuses bad ones in one sentence."""

from __future__ import annotations

import json
import re
import zipfile

import numpy as np
import pytest

from engine.events import STAGES
from workbench.options import SHOWN_DEVICES
from workbench.trace import load


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    from workbench.cli import main

    path = tmp_path_factory.mktemp("trace") / "run.moetrace"
    assert main(["trace", "record", str(path), "One", "Zwei", "--max-tokens", "4"]) == 0
    return path


def test_record_keeps_every_row_of_every_prompt(workbench, tmp_path):
    path = tmp_path / "x.moetrace"
    report = workbench(
        *("trace", "record", path, "One two", "Drei", "--max-tokens", "4"),
        *("--devices", "2", "--deterministic", "--json"),
    ).json
    trace = load(path)
    prompts = [len(r.prompt_token_ids) for r in trace.requests if r.kind == "added"]
    ends = [text.num_tokens for text in trace.texts if text.finished]
    assert len(prompts) == 2 == report["requests"]
    assert trace.num_rows == report["rows"] == sum(prompts) + sum(ends) - 2
    assert report["rows_by_cause"] == {"accepted": trace.num_rows}
    assert report["devices"] == 2 and report["deterministic"] is True


def test_record_without_prompts_runs_one_of_each_domain(workbench, tmp_path):
    path = tmp_path / "x.moetrace"
    said = workbench("trace", "record", path, "--max-tokens", "1")
    assert said.code == 0 and said.out == "" and "8 requests" in said.err
    assert {r.label for r in load(path).requests} >= {"en", "zh", "num"}


def test_record_takes_prompts_from_a_file_line_by_line(workbench, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("One\n\nTwo\nThree\n")
    report = workbench(
        *("trace", "record", tmp_path / "x.moetrace", "--prompt-file", prompts),
        *("--max-tokens", "1", "--json"),
    ).json
    assert report["requests"] == 3


def test_info_says_what_is_in_the_file(workbench, file):
    report, trace = workbench("trace", "info", file, "--json").json, load(file)
    assert report["version"] == 5 and report["model"] == "polyglot-moe"
    assert (report["steps"], report["rows"]) == (trace.num_steps, trace.num_rows)
    assert report["bytes"] == file.stat().st_size
    assert np.array(report["expert_counts"]).sum() == trace.num_rows * 4 * 2
    assert report["dropped"] == {"steps": 0, "rows": 0, "notes": 0}
    assert report["devices"] == trace.start.num_devices == SHOWN_DEVICES, "as `start` has"
    said = workbench("trace", "info", file)
    assert said.code == 0 and f"{trace.num_rows}" in said.out and said.err == ""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--precision", "auto"), r"formats .*% of {rows:,} expert rows in INT8, \d+ run again"),
        (("--capacity-factor", "1"), r"dropped .*{lost:,} of {rows:,} \(token, expert\) slots"),
        ((), None),
    ],
)
def test_info_says_which_formats_ran_and_what_found_no_room(workbench, tmp_path, words, told):
    file = tmp_path / "x.moetrace"
    workbench("trace", "record", file, "12 * 7 =", "Der Server", "--max-tokens", "4", *words)
    report, trace = workbench("trace", "info", file, "--json").json, load(file)
    rows = trace.columns["rows/topk_ids"].size
    lost = int((trace.columns["rows/phy_ids"] < 0).sum())
    assert report["dropped_slots"] == lost and (lost > 0) == ("--capacity-factor" in words)
    assert report["formats"]["rows"] == (rows if "--precision" in words else 0)
    said = workbench("trace", "info", file).out
    if told is None:
        assert "\nformats" not in said and "\ndropped" not in said
    else:
        assert re.search(told.format(rows=rows, lost=lost), said)


def test_export_writes_a_chrome_timeline_that_spans_the_steps(workbench, file, tmp_path):
    out = tmp_path / "timeline.json"
    assert workbench("trace", "export", file, "--out", out).code == 0
    events, trace = json.loads(out.read_text())["traceEvents"], load(file)
    steps = [e for e in events if e["ph"] == "X" and e["name"] == "step" and e["pid"]]
    assert len(steps) == trace.num_steps
    durations = [step["dur"] / 1e3 for step in steps]
    assert durations == pytest.approx(trace.columns["steps/duration_ms"].tolist())
    assert sum(step["args"]["rows"] for step in steps) == trace.num_rows
    stages = [e for e in events if e["ph"] == "X" and e["name"] == "gate"]
    gate = STAGES.index("gate")
    assert len(stages) == (trace.columns["spans/stages"] == gate).sum() > 0
    begun = [e["id"] for e in events if e["ph"] == "b"]
    ended = [e["id"] for e in events if e["ph"] == "e"]
    assert sorted(begun) == sorted(ended) == [0, 1]
    assert all(e["ts"] >= 0 for e in events if e["ph"] == "X")


@pytest.mark.parametrize("command", ["info", "export"])
def test_bad_files_are_one_sentence_and_exit_code_1(workbench, file, tmp_path, command):
    def refused(path, *words):
        more = ("--out", tmp_path / "out.json") if command == "export" else ()
        workbench("trace", command, path, *more).assert_refused(1, str(path), *words)

    refused(tmp_path / "none.moetrace", "No such file")
    refused(tmp_path, "directory")
    whole = file.read_bytes()
    bad = tmp_path / "bad.moetrace"
    bad.write_bytes(whole[: len(whole) // 2])
    refused(bad, "truncated or damaged")
    bad.write_bytes(b"not a trace")
    refused(bad, "is not a .moetrace file")
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(bad, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name == "manifest.json":
                data = json.dumps(json.loads(data) | {"version": 99}).encode()
            new.writestr(name, data)
    refused(bad, "format 99", "update the workbench")


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        (("record",), 2, "FILE"),
        (("record", "x.moetrace", ""), 2, "empty"),
        (("record", "no/folder/x.moetrace"), 1, "folder does not exist"),
        (("record", "x.moetrace", "a", "--prompt-file", "b"), 2, "not both"),
        (("record", "x.moetrace", "a", "--max-tokens", "-1"), 2, "max_tokens"),
        (("record", "x.moetrace", "7" * 600), 2, "601 tokens"),
        (("info",), 2, "FILE"),
        (("export", "x.moetrace"), 2, "--out"),
        (("erase", "x.moetrace"), 2, "erase"),
    ],
)
def test_bad_usage_is_one_sentence(workbench, tmp_path, monkeypatch, words, code, hint):
    monkeypatch.chdir(tmp_path)
    workbench("trace", *words).assert_refused(code, hint)
    assert not (tmp_path / "x.moetrace").exists()


def test_a_timeline_that_cannot_be_written_is_one_sentence(workbench, file, tmp_path):
    out = tmp_path / "no" / "x.json"
    workbench("trace", "export", file, "--out", out).assert_refused(
        1, str(out), "folder does not exist"
    )


def test_draw_writes_a_page_with_what_was_decided_on_all_levels(workbench, tmp_path):
    path, out = tmp_path / "x.moetrace", tmp_path / "x.html"
    workbench(
        *("trace", "record", path, "12 * 7 = ", "--max-tokens", "6", "--precision", "auto"),
        *("--draft", "polyglot-draft", "--draft-length", "fixed", "--ban-expert", "2:3"),
    )
    assert load(path).expert_counts()[2][3] == 0 < load(path).expert_counts()[1][3]
    said = workbench("trace", "draw", path, "--out", out, "--theme", "dark")
    assert said.code == 0 and said.out == "" and str(out) in said.err
    body = out.read_text(encoding="utf-8").rpartition("</script></head>")[2]
    assert "<section id=unit_formats>" in body and "<section id=draft_acceptance>" in body
    refused = ("--figure", "pie", 2), ("--theme", "pink", 2), ("--out", tmp_path / "no" / "x", 1)
    for option, value, code in refused:
        words = ("trace", "draw", path, "--out", out, option, value)
        workbench(*words).assert_refused(code, str(value))
