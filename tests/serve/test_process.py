"""`workbench serve` as a process: SIGTERM drains, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.serve.conftest import NAME, until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def start(tmp_path) -> Iterator:
    running = []

    def run(*options: str):
        command = [sys.executable, "-m", "workbench", "serve", "--port", "0", "--json",
                   "--audit-log", str(tmp_path / "audit.jsonl"), *options]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
        running.append(process)
        return process

    yield run
    for process in running:
        process.kill()
        process.communicate()


def test_sigterm_lets_running_streams_end_and_refuses_new_ones(start):
    process = start()
    url = json.loads(process.stdout.readline())["url"]
    body = {"model": NAME, "prompt": "Der Server", "max_tokens": 120, "temperature": 0,
            "ignore_eos": True, "stream": True}  # fmt: skip
    ended: list[str] = []

    def follow():
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            lines = [line for line in response.iter_lines() if line]
            ended.append(lines[-1])
            ended.append(json.loads(lines[-2][6:])["choices"][0]["finish_reason"])

    followers = [threading.Thread(target=follow) for _ in range(3)]
    for follower in followers:
        follower.start()
    assert until(lambda: httpx.get(f"{url}/v1/status").json()["engine"]["num_running"] == 3, 10)
    process.send_signal(signal.SIGTERM)
    assert until(lambda: httpx.get(f"{url}/readyz").status_code == 503)
    refused = httpx.post(f"{url}/v1/completions", json=body, timeout=10)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
    assert httpx.get(f"{url}/healthz").status_code == 200
    for follower in followers:
        follower.join(60)
    assert ended.count("data: [DONE]") == 3 and ended.count("length") == 3
    assert process.wait(20) == 0
    said = process.stderr.read()
    assert "drained in" in said and "Traceback" not in said


@pytest.mark.slow
def test_ranks_end_with_the_service(start):
    process = start("--ranks", "3", "--max-ranks", "4")
    json.loads(process.stdout.readline())
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 3
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert until(lambda: not any(child.is_running() for child in children), 5)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--host", "0.0.0.0"], 2, "needs keys"),
        (["--model", "/nowhere"], 1, "does not exist"),
        (["--add-key", "me"], 2, "--token-file"),
        (["--ranks", "2", "--devices", "3"], 2, "num_devices"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_sentence(workbench, options, code, words):
    workbench("serve", *options).assert_refused(code, words)


def test_a_key_is_made_and_shown_once(workbench, tmp_path):
    file = tmp_path / "keys.json"
    done = workbench(
        "serve", "--token-file", file, "--add-key", "me", "--scope", "operate", "--json"
    )
    assert done.json["scopes"] == ["operate"] and done.json["key"].startswith("trw_me_")
    assert done.json["key"].split("_", 2)[2] not in file.read_text()
