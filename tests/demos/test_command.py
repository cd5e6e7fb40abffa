"""`workbench demo`, each in a process of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.demos.conftest import DEMO

ROOT = Path(__file__).resolve().parents[2]


def workbench(*words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "workbench", *words],
        cwd=ROOT,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )


def test_list_as_json_is_one_object():
    done = workbench("demo", "list", "--json")
    assert done.returncode == 0
    assert [demo["id"] for demo in json.loads(done.stdout)["demos"]] == [DEMO]


def test_an_unknown_demo_is_one_sentence_and_exit_2():
    done = workbench("demo", "play", "routing", "--headless")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and DEMO in done.stderr


@pytest.mark.timeout(300)
def test_headless_as_json_is_one_object_and_exit_0():
    done = workbench("demo", "play", DEMO, "--headless", "--json", "--threads=1")
    report = json.loads(done.stdout)
    assert done.returncode == 0, report
    assert report["passed"] and report["restored"] and len(report["steps"]) == 7
    check = report["steps"][0]["checks"][0]
    assert check["low"] <= check["value"] <= check["high"] and check["formula"]


def test_in_the_terminal_lines_drive_it_and_the_end_of_input_ends_it():
    done = workbench("demo", "play", DEMO, "--threads=1", stdin="\n6\nb\n")
    assert done.returncode == 0, done.stderr
    shown = [line for line in done.stdout.splitlines() if " of 7 " in line]
    assert [line.split()[0] for line in shown] == ["1", "2", "6", "5"]
    assert "expert 0 may not be chosen in layer 3" in done.stdout


@pytest.mark.timeout(300)
def test_ctrl_c_puts_the_engine_back_and_says_so():
    process = subprocess.Popen(
        [sys.executable, "-m", "workbench", "demo", "play", DEMO, "--headless", "--threads=1"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    while "Every token picks" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, words = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "as it was at the start" in words
