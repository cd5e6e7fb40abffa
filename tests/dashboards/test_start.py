"""`workbench start` with the real engine: it serves a page, and nothing of it outlives it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from engine.errors import CheckpointError, ConfigError, MachineError
from engine.runtime.telemetry import Aggregator
from workbench import start as start_module
from workbench.lifecycle import Child

ROOT = Path(__file__).resolve().parents[2]
WITH_LAB = ("-m", "workbench", "start")
GONE_S = 5.0
"""Within this nothing may be left; a few tenths are usual."""


class Running:
    """A `workbench start` of our own and what it has started."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid
        self.report: dict[str, Any] = {}
        self.family: list[psutil.Process] = []

    def ready(self) -> str:
        """Wait for its JSON line; return the address."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        self.report = json.loads(line)
        self.note_family()
        return str(self.report["url"])

    def note_family(self) -> None:
        parent = psutil.Process(self.pid)
        found = [parent, *parent.children(recursive=True)]
        self.family += [process for process in found if process not in self.family]

    def wait_for_note(self, words: str) -> None:
        assert self.process.stderr is not None
        while words not in (line := self.process.stderr.readline()):
            assert line, f"ended before it said {words!r}"

    def assert_all_gone(self) -> None:
        _, alive = psutil.wait_procs(self.family, timeout=GONE_S)
        left = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        assert len(self.family) >= 2 and not left


@pytest.fixture
def launch() -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start(*arguments: str, **how: Any) -> Running:
        program = how.pop("program", (*WITH_LAB, "--no-lab"))
        command = [*how.pop("before", ()), sys.executable, *program, *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how}
        process = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)
        started.append(Running(process))
        return started[-1]

    yield start
    for running in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            running.note_family()
        for process in running.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        running.process.communicate()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def post_kernel(lab_url: str) -> None:
    """Let JupyterLab start a kernel, which nobody without the token can."""
    base, _, token = lab_url.partition("/lab/")
    token = token.rpartition("token=")[2]
    asked = urllib.request.Request(
        f"{base}/api/kernels", b"{}", {"Authorization": f"token {token}"}, method="POST"
    )
    assert json.load(urllib.request.urlopen(asked, timeout=30))["id"]
    refused = urllib.request.Request(f"{base}/api/kernels")
    with pytest.raises(OSError, match="403"):
        urllib.request.urlopen(refused, timeout=10)


def test_it_serves_page_and_lessons_runs_the_engine_and_ctrl_c_ends_all_with_code_0(
    launch, tmp_path
):
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        socket.create_server(("127.0.0.1", 0)) as taken_too,
    ):
        port, lab_port = taken.getsockname()[1], taken_too.getsockname()[1]
        running = launch(
            "--json", f"--port={port}", f"--lab-port={lab_port}", f"--lessons={tmp_path}",
            program=WITH_LAB,
        )  # fmt: skip
        url = running.ready()
    assert port < int(url.rstrip("/").rsplit(":", 1)[1]) < port + 20, "the next free port"
    page = urllib.request.urlopen(url, timeout=10).read().decode()
    assert "TokenRouter Workbench" in page and "cdn." not in page
    now = urllib.request.urlopen(f"{url}now?theme=dark", timeout=10)
    assert now.geturl() == f"{url}?theme=dark", "/now is the page Now too"
    command = " ".join(psutil.Process(running.report["dashboard_pid"]).cmdline())
    assert "--key-file=-" in command, "the key is not on the command line"

    lab_url = running.report["lab_url"]
    assert f":{lab_port}/" not in lab_url and "/lab/tree/00_start_here.ipynb" in lab_url
    assert (tmp_path / "00_start_here.ipynb").is_file(), "the learner's own copy"
    assert running.report["lessons"] == str(tmp_path)
    post_kernel(lab_url)
    running.note_family()
    assert len(running.family) >= 4, "engine, dashboard, JupyterLab, kernel"
    running.process.send_signal(signal.SIGINT)
    out, err = running.process.communicate(timeout=3 * GONE_S)
    assert running.process.returncode == 0, err
    assert out == "" and "SIGINT" in err and "Traceback" not in err
    running.assert_all_gone()


@pytest.mark.slow
def test_jupyterlab_and_its_kernel_go_with_a_killed_parent(launch, tmp_path):
    running = launch("--json", f"--lessons={tmp_path}", program=WITH_LAB)
    running.ready()
    post_kernel(running.report["lab_url"])
    running.note_family()
    assert len(running.family) >= 4, "engine, dashboard, JupyterLab, kernel"
    running.process.kill()
    running.process.wait()
    running.assert_all_gone()


def test_a_killed_parent_leaves_nothing_even_while_another_holds_its_pipe(launch):
    """The pipe's end does not come then; the watch on the parent must. Ranks end with it, too."""
    running = launch("--json", "--port", str(free_port()), "--ranks", "2")
    running.ready()
    running.wait_for_note("the engine runs")
    running.note_family()
    assert len(running.family) >= 4
    # Somebody else has the other end of the child's standard input.
    pipes = [Path(f"/proc/{running.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{running.pid}/fd")]
    child_stdin = os.readlink(f"/proc/{running.report['dashboard_pid']}/fd/0")
    held = [os.open(pipe, os.O_WRONLY) for pipe in pipes if os.readlink(pipe) == child_stdin]
    try:
        assert held
        os.kill(running.pid, signal.SIGKILL)
        running.assert_all_gone()
    finally:
        for descriptor in held:
            os.close(descriptor)


def test_without_jupyterlab_that_is_said_the_rest_runs_and_a_closed_terminal_ends_all(
    launch, tmp_path
):
    (tmp_path / "file").touch()
    ours, theirs = os.openpty()
    running = launch(
        f"--port={free_port()}", f"--lessons={tmp_path / 'file' / 'below'}",
        program=WITH_LAB, before=("setsid", "--ctty"), stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    said = b""
    while b"http://127.0.0.1:" not in said:
        said += os.read(ours, 4096)
    lines = said.decode().replace("\r", "").splitlines()
    assert lines[0].startswith("Starting the engine, the dashboard and JupyterLab; Ctrl-C ends")
    assert any("JupyterLab is left out: " in line and "--lessons DIR" in line for line in lines)
    assert any(line.startswith("  Dashboard   http://127.0.0.1:") for line in lines)
    assert len(lines) <= 6, lines
    running.note_family()
    os.close(ours)
    running.assert_all_gone()


def test_sigterm_while_the_engine_loads_ends_all_with_code_0(launch):
    running = launch("--json", "--port", str(free_port()))
    end = time.monotonic() + 20
    while len(running.family) < 2:
        assert time.monotonic() < end
        time.sleep(0.01)
        running.note_family()
    time.sleep(0.3)
    running.process.send_signal(signal.SIGTERM)
    _, err = running.process.communicate(timeout=20)
    assert running.process.returncode == 0, err
    running.assert_all_gone()


def test_the_loop_ends_with_the_dashboards_last_words():
    idle = SimpleNamespace(serve=lambda _: None, step=lambda _: False, latest=None)
    dashboard = Child("dashboard", [sys.executable, "-c", "import time; time.sleep(60)"],
                      first_line="")  # fmt: skip
    os.kill(dashboard.pid, signal.SIGKILL)
    say = start_module._Speaker(True, False)
    try:
        with pytest.raises(MachineError, match="the dashboard has ended .signal SIGKILL"):
            start_module._loop(None, idle, idle, idle, dashboard, None, say, 20.0)
    finally:
        dashboard.stop()


@pytest.mark.slow
def test_a_dead_dashboard_is_told_and_ends_the_engine(launch):
    running = launch("--json", "--port", str(free_port()))
    running.ready()
    running.wait_for_note("the engine runs")
    running.note_family()
    os.kill(running.report["dashboard_pid"], signal.SIGKILL)
    _, err = running.process.communicate(timeout=10)
    assert running.process.returncode == 1
    assert "the dashboard has ended (signal SIGKILL)" in err and "Traceback" not in err
    running.assert_all_gone()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"port": 0}, ConfigError, "port"),
        ({"port": 70000}, ConfigError, "port"),
        ({"lab_port": 0}, ConfigError, "lab_port"),
        ({"seconds": 0.0}, ConfigError, "seconds"),
        ({"running": 0}, ConfigError, "running"),
        ({"devices": 0}, ConfigError, "num_devices"),
        ({"threads": 0}, ConfigError, "num_threads"),
        ({"model": "no-such-model"}, CheckpointError, "no-such-model"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_starts(monkeypatch, options, error, words):
    def must_not_start(*_: object, **__: object) -> None:
        raise AssertionError("a child was started")

    monkeypatch.setattr(start_module, "Child", must_not_start)
    with pytest.raises(error, match=words):
        start_module.start(**options)


@pytest.mark.parametrize("name", ["panel", "psutil"])
def test_a_missing_package_is_one_sentence_that_names_the_extra(monkeypatch, name):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == name else real(n))
    with pytest.raises(MachineError, match=rf"needs {name}; install .*\[ui\]"):
        start_module.start()


def test_rates_are_said_in_one_line(source):
    frame = source.step(20)
    line = start_module.rates(frame)
    assert f"{frame.meta['generated_per_s']:,.0f} tokens/s" in line
    assert "6 running" in line and line.endswith("watched by 1 program")
    assert start_module.rates(None) == start_module.rates(Aggregator().frame(1, 1.0)) == "idle"
