"""An engine and its dashboard started from a notebook's kernel leave nothing when that ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from jupyter_client.manager import KernelManager

ROOT = Path(__file__).resolve().parents[2]
START = """
import json
from workbench import lessons
one = lessons.live(running=2, port={port})
two = lessons.live(running=2, port={port})
print(json.dumps([one.url, one.dashboard_pid, one is two]))
"""


class Kernel:
    """A real kernel, as a notebook has one."""

    def __init__(self) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(ROOT))
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def run(self, code: str) -> str:
        said: list[str] = []

        def hear(message: dict) -> None:
            content = message["content"]
            said.append(content.get("text", "") if content.get("name") == "stdout" else "")
            assert message["msg_type"] != "error", content

        self.client.execute_interactive(code, timeout=90, output_hook=hear)
        return "".join(said)

    def start(self, port: int) -> tuple[str, psutil.Process]:
        url, pid, same = json.loads(self.run(START.format(port=port)))
        assert same, "the start cell run twice gives the running one"
        with urllib.request.urlopen(url, timeout=60) as answer:
            assert b"TokenRouter Workbench" in answer.read()
        return url, psutil.Process(pid)


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    yield kernel
    kernel.client.stop_channels()
    kernel.manager.shutdown_kernel(now=True)
    kernel.manager.cleanup_resources()
    kernel.manager.context.term()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_killed_or_restarted_kernel_takes_its_dashboard_along_and_may_start_again(kernel):
    port = free_port()
    url, dashboard = kernel.start(port)
    assert url == f"http://127.0.0.1:{port}/"

    os.kill(kernel.manager.provisioner.pid, signal.SIGKILL)
    assert dashboard.wait(timeout=10) is None and not dashboard.is_running()

    kernel.manager.restart_kernel(now=True)
    kernel.client.wait_for_ready(timeout=60)
    with socket.create_server(("127.0.0.1", port)):  # which also shows that it is free again
        elsewhere, dashboard = kernel.start(port)
    assert elsewhere != url, "a taken port: the next one is printed"

    kernel.manager.restart_kernel()
    kernel.client.wait_for_ready(timeout=60)
    assert dashboard.wait(timeout=10) is None and not dashboard.is_running()
