"""`workbench doctor`: every line has a status and a reason, and only what is needed fails it."""

from __future__ import annotations

import socket

import pytest

from workbench import doctor
from workbench.doctor import Check, examine, worst


def test_this_machine_is_examined_line_by_line(workbench):
    report = workbench("doctor", "--json").json
    names = [check["name"] for check in report["checks"]]
    assert len(names) == len(set(names)) >= 15
    assert {"python", "torch", "gpu", "memory", "disk", "model", "loopback port"} <= set(names)
    for check in report["checks"]:
        assert check["status"] in ("ok", "warn", "fail") and check["found"]
        assert bool(check["advice"]) == (check["status"] != "ok")
    assert report["status"] in ("ok", "warn")


def test_without_a_gpu_it_warns_and_passes(workbench, monkeypatch):
    monkeypatch.setattr(doctor, "gpus", lambda: [])
    ended = workbench("doctor")
    assert ended.code == 0 and ended.err == ""
    assert "warn  gpu" in ended.out and "runs on the CPU" in ended.out


def test_a_gpu_is_named_with_its_memory(monkeypatch):
    monkeypatch.setattr(doctor, "gpus", lambda: [{"name": "H200", "memory_gb": 150.0}] * 2)
    monkeypatch.setattr(doctor, "_cudnn_version", lambda: "9")
    (check,) = (check for check in examine() if check.name == "gpu")
    assert check.status == "ok" and "2 x H200 150.0 GB" in check.found


def test_a_missing_model_fails_with_exit_code_1(workbench):
    ended = workbench("doctor", "--model", "no/such/folder")
    assert ended.code == 1 and "fail  model" in ended.out
    assert "no/such/folder" in ended.out and "Traceback" not in ended.err


def test_too_little_memory_fails(monkeypatch):
    monkeypatch.setattr(doctor, "total_memory", lambda: int(1e9))
    assert doctor._memory().status == "fail"
    monkeypatch.setattr(doctor, "total_memory", lambda: int(3e9))
    assert doctor._memory().status == "warn"


def test_missing_screens_only_warn(monkeypatch):
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    assert doctor._screens().status == doctor._transformers().status == "warn"
    assert "panel" in doctor._screens().found


def test_a_port_that_cannot_be_bound_fails(monkeypatch):
    def refuse(self, address):
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    assert doctor._port().status == "fail"


def test_a_check_that_breaks_is_a_finding(monkeypatch):
    def broken():
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(doctor, "_disk", broken)
    (check,) = (check for check in examine() if check.name == "disk")
    assert check.status == "fail" and "two lines" in check.found


@pytest.mark.parametrize(
    ("statuses", "result"),
    [("ok ok", "ok"), ("ok warn", "warn"), ("warn fail ok", "fail"), ("", "ok")],
)
def test_the_worst_line_decides(statuses, result):
    assert worst([Check("x", status, "y") for status in statuses.split()]) == result
