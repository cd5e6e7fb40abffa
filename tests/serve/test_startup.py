"""Five stages: in order, each failing in its own words, and nothing left of a failed start."""

from __future__ import annotations

import json
import shutil
import socket
import threading

import pytest

from engine.errors import ExchangeError
from engine.exchange import group
from engine.serve.health import STAGES, Health
from engine.serve.stages import Stages, StartError
from engine.serve.startup import started
from tests.serve.conftest import MODEL, serve_config, until


def test_the_stages_are_told_in_order_with_time_and_outcome():
    said: list[str] = []
    before = set(threading.enumerate())
    with started(serve_config({"num_devices": 2}), said.append) as server:
        assert server.service.reason() is None
        names = {thread.name for thread in set(threading.enumerate()) - before}
        assert {"engine", "http", "telemetry"} <= names
    marks = [line for line in said if line.startswith("stage")]
    assert len(marks) == 2 * len(STAGES)
    for number, name in enumerate(STAGES):
        begins, ends = marks[2 * number : 2 * number + 2]
        assert begins == f"stage {number + 1}/5 {name}: begins"
        assert ends.startswith(f"stage {number + 1}/5 {name}: ok in "), ends
    text = "\n".join(said)
    for words in ("SHA-256", "one to one", "device 0: experts 0-3", "(50.0%)", "http://127.0.0.1:"):
        assert words in text
    assert until(lambda: not set(threading.enumerate()) - before)


def failing(config) -> tuple[StartError, list[str]]:
    said: list[str] = []
    before = set(threading.enumerate())
    with pytest.raises(StartError) as failed:
        with started(config, said.append):
            pytest.fail("it started")
    assert until(lambda: not set(threading.enumerate()) - before)
    assert said[-1].startswith(f"stage {failed.value.stage}/5") and "failed after" in said[-1]
    return failed.value, said


@pytest.fixture
def copied(tmp_path):
    """A model folder of the test's own."""
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    return folder


def config_of(folder, engine=None, **options):
    import dataclasses

    config = serve_config(engine, **options)
    return dataclasses.replace(config, engine=dataclasses.replace(config.engine, model=folder))


def test_stage_one_fails_on_a_config(copied, tmp_path):
    (copied / "config.json").write_text("{")
    failed, _ = failing(config_of(copied))
    assert failed.stage == 1 and "configuration" in str(failed)
    failed, _ = failing(serve_config(token_file=tmp_path / "none.json"))
    assert failed.stage == 1 and "--add-key" in str(failed) and failed.exit_code == 2


def test_stage_two_fails_when_no_group_can_be_made(monkeypatch):
    def refuse(*_, **__):
        raise ExchangeError("rank 0 could not join.")

    monkeypatch.setattr("engine.serve.startup.Group", refuse)
    failed, _ = failing(serve_config({"num_ranks": 2}))
    assert failed.stage == 2 and "process group" in str(failed) and "could not join" in str(failed)
    assert group.Group is not refuse


def test_stage_three_fails_on_damaged_weights(copied):
    weights = copied / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-5] ^= 1
    weights.write_bytes(raw)
    failed, said = failing(config_of(copied))
    assert failed.stage == 3 and "SHA-256" in str(failed) and "model.safetensors" in str(failed)
    assert any("stage 2/5 process group: ok" in line for line in said)


def test_stage_three_fails_on_names_that_do_not_match(copied):
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    (copied / "manifest.json").unlink()
    failed, _ = failing(config_of(copied))
    assert failed.stage == 3 and "not found" in str(failed)


def test_stage_four_fails_on_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        failed, _ = failing(serve_config(port=taken.getsockname()[1]))
    assert failed.stage == 4 and "another --port" in str(failed)


def test_stage_four_fails_on_files_that_are_no_certificate(tmp_path):
    (tmp_path / "no.pem").write_text("no")
    failed, _ = failing(serve_config(tls_cert=tmp_path / "no.pem", tls_key=tmp_path / "no.pem"))
    assert failed.stage == 4 and "tls_cert" in str(failed)


def test_stage_five_fails_when_the_first_completion_does():
    failed, said = failing(serve_config({"max_model_len": 3}))
    assert failed.stage == 5 and "context_length_exceeded" in str(failed)
    assert any("stage 4/5 listening: ok" in line for line in said)


def test_ready_only_after_the_last_stage():
    health = Health(1)
    stages = Stages(lambda words: None, health)
    for number, name in enumerate(STAGES):
        with stages.stage(name):
            assert f"stage {number + 1} of 5, {name}" in str(health.reason())
    assert health.reason() is None
    health.drain()
    assert "draining" in str(health.reason())


def test_a_fault_of_ours_is_not_dressed_up_as_the_users():
    with pytest.raises(AssertionError):
        with Stages(lambda words: None, Health(1)).stage(STAGES[0]):
            raise AssertionError("ours")
