"""Two set-ups of one folder: the second waits for the first, and says so."""

from __future__ import annotations

import importlib.util
import threading

import pytest

from workbench import paths

fcntl = pytest.importorskip("fcntl")


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("install", paths.root() / ".ci" / "install.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_second_set_up_waits_for_the_first_and_says_so(script, tmp_path, capsys, monkeypatch):
    ran = threading.Event()
    monkeypatch.setattr(script, "install", lambda log, *arguments: ran.set() or 0)
    log = str(tmp_path / "install.log")
    with (tmp_path / ".installing").open("w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        second = threading.Thread(target=script.main, args=(log, "something"))
        second.start()
        assert not ran.wait(0.3), "both would write into one environment"
        assert "another set-up runs here; waiting for it" in capsys.readouterr().out
    second.join(10)
    assert ran.is_set()
    assert script.main(log) == 0 and capsys.readouterr().out == "", "alone it says nothing"
