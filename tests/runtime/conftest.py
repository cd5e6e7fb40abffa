"""The shipped model, loaded once for each way of running it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from engine import Engine, EngineConfig, SamplingParams
from engine.runtime.sequence import Sequence
from engine.runtime.telemetry import Telemetry
from tests.runtime.telemetry_examples import KEY

MODEL = Path(__file__).parents[2] / "data/models/polyglot-moe"
DRAFT = Path(__file__).parents[2] / "data/models/polyglot-draft"

PROMPTS = [
    "It is a truth universally",
    "Sie können das Dokument speichern",
    "Le serveur de messagerie",
    "Y dijo el rey",
    "您可以使用此命令",
    "def read_file(self, path):\n    ",
    "The sum of two real numbers",
    "12 * 7 = ",
]


class Listener:
    """A sink that keeps everything."""

    def __init__(self):
        self.enabled = True
        self.events = []

    def emit(self, event):
        self.events.append(event)

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


STEP_S = 10.0
"""Seconds of waiting that one step of priority is worth."""


def sequence(request_id, tokens=4, *, priority=0, arrived_s=0.0):
    """Return a sequence for a scheduler without a model."""
    return Sequence(
        request_id=request_id,
        label="",
        prompt_token_ids=[5] * tokens,
        params=SamplingParams(),
        max_tokens=8,
        seed=0,
        home=0,
        watch=frozenset(),
        detokenizer=None,
        priority=priority,
        due_s=arrived_s + priority * STEP_S,
    )


@cache
def _engine(**options):
    return Engine(EngineConfig(model=MODEL, num_blocks=512, **options))


@pytest.fixture
def shared_engine():
    """Return engines by option, made once; tests must leave them idle and unchanged."""
    return _engine


@pytest.fixture
def make_engine():
    """Make an engine of the test's own, with a listener."""

    def make(listener=None, faults=None, **options):
        options = {"num_blocks": 256, "num_threads": 1} | options
        return Engine(EngineConfig(model=MODEL, **options), sink=listener, faults=faults)

    return make


@pytest.fixture
def prompts():
    return list(PROMPTS)


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    stream = Telemetry(key=KEY, max_hz=50.0)
    yield stream
    stream.close()
