"""`workbench demo`: what it prints, how it ends; the playlist itself on the shared engine."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.demos.conftest import DEMO
from workbench.cli import INTERRUPTED, main
from workbench.demos.terminal import drive

ROOT = Path(__file__).resolve().parents[2]


def test_list_as_json_is_one_object(capfd):
    assert main(["demo", "list", "--json"]) == 0
    assert [demo["id"] for demo in json.loads(capfd.readouterr().out)["demos"]] == [DEMO]


def test_an_unknown_demo_is_one_sentence_and_exit_2(capfd):
    assert main(["demo", "play", "routing", "--headless"]) == 2
    said = capfd.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and DEMO in said.err


def test_every_expectation_of_the_playlist_holds(player, clock):
    """As `play --headless` walks it; only the pauses between measurements are skipped."""
    run = player.run

    def run_and_hurry() -> bool:
        clock.ahead_s += 0.05
        return run()

    player.run = run_and_hurry
    try:
        reports = player.rehearse()
    finally:
        del player.run
    assert [report["id"] for report in reports if not report["passed"]] == [], reports
    assert len(reports) == 7


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_headless_as_json_is_one_object_and_exit_0():
    done = subprocess.run(
        [sys.executable, "-m", "workbench", "demo", "play", DEMO, "--headless", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    report = json.loads(done.stdout)
    assert done.returncode == 0, report
    assert report["passed"] and report["restored"] and len(report["steps"]) == 7
    check = report["steps"][0]["checks"][0]
    assert check["low"] <= check["value"] <= check["high"] and check["formula"]


def test_in_the_terminal_lines_drive_it_and_the_end_of_input_ends_it(player, monkeypatch, capfd):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n6\nb\n"))
    drive(player)
    shown = capfd.readouterr().out
    steps = [line for line in shown.splitlines() if " of 7 " in line]
    assert [line.split()[0] for line in steps] == ["1", "2", "6", "5"]
    assert "expert 0 may not be chosen in layer 3" in shown


def test_ctrl_c_puts_the_engine_back_and_says_so(monkeypatch, capfd):
    shown = []

    def interrupt(step, checks) -> None:
        shown.append(step.title)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("workbench.commands.demo._print_step", interrupt)
    assert main(["demo", "play", DEMO, "--headless", "--threads=1"]) == INTERRUPTED
    said = capfd.readouterr()
    assert len(shown) == 1 and "as it was at the start" in said.err and "Traceback" not in said.err
