"""One service for all tests that leave it as they found it, and others made to order."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engine import EngineConfig
from engine.serve.config import Limits, ServeConfig
from engine.serve.journal import Journal
from engine.serve.startup import Server, started
from tests.workbench.conftest import workbench  # noqa: F401  the fixture

MODEL = Path(__file__).parents[2] / "data/models/polyglot-moe"
NAME = "polyglot-moe"
ENGINE: dict[str, Any] = {"num_blocks": 256, "num_threads": 1, "max_running": 8}


def serve_config(engine: dict[str, Any] | None = None, **options: Any) -> ServeConfig:
    made = EngineConfig(model=MODEL, **{**ENGINE, **(engine or {})})
    return ServeConfig(engine=made, **{"port": 0, **options})


@pytest.fixture(scope="session")
def _server() -> Iterator[Server]:
    with started(serve_config(limits=Limits(queued=100))) as server:
        yield server


@pytest.fixture
def server(_server: Server) -> Server:
    """The shared service, idle."""
    assert until(lambda: _server.service.loop.books.running == 0)
    return _server


@pytest.fixture(scope="module")
def make_server() -> Iterator[Callable[..., Server]]:
    """Start services of a module's own; they end with it."""
    with ExitStack() as stack:

        def make(engine: dict[str, Any] | None = None, **options: Any) -> Server:
            return stack.enter_context(started(serve_config(engine, **options)))

        yield make


@pytest.fixture(scope="session")
def _client(_server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=_server.url, timeout=30) as client:
        yield client


@pytest.fixture
def client(_client: httpx.Client, server: Server) -> httpx.Client:
    """A client of the shared service."""
    return _client


@pytest.fixture(scope="session")
def _sdk(_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{_server.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


@pytest.fixture
def sdk(_sdk: openai.OpenAI, server: Server) -> openai.OpenAI:
    """The unmodified client."""
    return _sdk


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what a test makes the service say from the journals of other services."""
    for name in Journal.loggers:
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])


@pytest.fixture
def complete(client: httpx.Client) -> Callable[..., httpx.Response]:
    """Ask for a greedy completion."""

    def ask(prompt: Any = "Der Server", **options: Any) -> httpx.Response:
        body = {"model": NAME, "prompt": prompt, "max_tokens": 4, "temperature": 0, **options}
        return client.post("/v1/completions", json=body)

    return ask


def until(holds: Callable[[], bool], seconds: float = 2.0) -> bool:
    """Wait until something holds; says whether it did in time."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def slow_gate(value: Any) -> Any:
    """A fault: every layer takes a twentieth of a second longer."""
    time.sleep(0.05)
    return value


@contextlib.contextmanager
def slowly(server: Server) -> Iterator[None]:
    """Make steps slow, so that a test can act in the middle of one."""
    control = server.service.engine.control
    control.inject("gate.lock", slow_gate, 30.0)
    try:
        yield
    finally:
        control.clear("gate.lock")
