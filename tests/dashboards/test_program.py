"""`python -m dashboards`: what it refuses, in one sentence each."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dashboards.__main__ import main
from dashboards.app import PORT_TRIES, make_server
from engine.errors import ConfigError, MachineError
from workbench import lifecycle
from workbench.lifecycle import Child, end_with_parent

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("address", "key", "words"),
    [
        ("nowhere", "00", "address (nowhere) must be HOST:PORT"),
        ("127.0.0.1:x", "00", "HOST:PORT"),
        ("127.0.0.1:1", "not hex", "must hold the key in hex"),
    ],
)
def test_bad_arguments_are_one_sentence_and_code_2(tmp_path, capsys, address, key, words):
    file = tmp_path / "key"
    file.write_text(key)
    assert main(["--address", address, "--key-file", str(file)]) == 2
    assert words in capsys.readouterr().err


def test_a_missing_key_file_is_named(tmp_path, capsys):
    assert main(["--address", "127.0.0.1:1", "--key-file", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err


def test_a_parent_that_is_not_one_is_refused():
    with pytest.raises(ConfigError, match="PID:START_TIME"):
        end_with_parent("me", False)
    with pytest.raises(MachineError, match="gone already"):
        end_with_parent(f"{os.getpid()}:1.0", False)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    with pytest.raises(MachineError, match="gone already"):
        end_with_parent(f"{ended.pid}:{psutil.Process().create_time()}", False)


def test_importing_the_stream_and_the_sources_loads_no_torch():
    code = (
        "import sys, dashboards.source, dashboards.readings, workbench.start, workbench.lifecycle; "
        "print([n for n in ('torch', 'panel', 'psutil', 'triton') if n in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]"


def test_the_next_free_port_is_taken_and_none_at_all_is_one_sentence(source):
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        server = make_server(source, first)
        assert first < server.port < first + PORT_TRIES
        server.stop()
        server.io_loop.close()
        for port in range(first + 1, first + PORT_TRIES):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
        with pytest.raises(MachineError, match=f"no free port between {first} and"):
            make_server(source, first)


CHILD = """
import os, sys, time
from workbench.lifecycle import end_with_parent
line = sys.stdin.readline()
end_with_parent(sys.argv[1], True)
print('{"said": "%s"}' % line.strip(), flush=True)
time.sleep(60)
"""
PARENT = """
import sys, time
from workbench import lifecycle
from workbench.lifecycle import Child, own_identity
child = Child("child", [sys.executable, "-c", sys.argv[1], own_identity()], first_line="hello")
print(child.report(10)["said"], child.pid, flush=True)
time.sleep(60)
"""


def test_a_child_ends_at_once_when_its_parent_is_killed():
    command = [sys.executable, "-c", PARENT, CHILD]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        said, pid = parent.stdout.readline().split()
        child = psutil.Process(int(pid))
        parent.kill()
        parent.wait()
        psutil.wait_procs([child], timeout=5)
    assert said == "hello" and not child.is_running()


def test_a_child_that_ignores_its_end_is_killed_with_its_own_children(monkeypatch):
    monkeypatch.setattr(lifecycle, "_GRACE_S", 0.3)
    stubborn = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
        "print('{\"pid\": %d}' % p.pid, flush=True); time.sleep(60)"
    )
    child = Child("child", [sys.executable, "-c", stubborn], first_line="")
    grandchild = psutil.Process(child.report(10)["pid"])
    began = time.monotonic()
    child.stop()
    psutil.wait_procs([grandchild], timeout=5)
    assert not child.alive() and time.monotonic() - began < 10
    assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE


def test_a_child_that_fails_is_told_with_its_last_words():
    child = Child("helper", [sys.executable, "-c", "raise SystemExit('no luck')"], first_line="")
    with pytest.raises(MachineError, match=r"^the helper has ended \(exit code 1\): no luck"):
        child.report(10)
    child.stop()
