"""One engine on four ranks for all tests: starting processes is what costs most here.

A test may lose or change ranks; before the next one the engine is whole again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine import Completion, Engine, EngineConfig, SamplingParams
from engine.events import ControlEvent, StartEvent, StepEvent
from workbench.bench.recovery import Losses, rejoin

MODEL = "data/models/polyglot-moe"
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


class Heard(Losses):
    """A sink that keeps what was said."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []
        self.start: StartEvent | None = None

    def emit(self, event: Any) -> None:
        super().emit(event)
        if isinstance(event, StartEvent):
            self.start = event
        self.events.append(event)

    def controls(self, action: str) -> list[dict[str, Any]]:
        return [e.detail for e in self.events if isinstance(e, ControlEvent) and e.action == action]

    def steps(self) -> list[StepEvent]:
        return [event for event in self.events if isinstance(event, StepEvent)]


def config(num_ranks: int, **options: Any) -> EngineConfig:
    return EngineConfig(
        model=MODEL,
        num_ranks=num_ranks,
        deterministic=True,
        hash_logits=True,
        **{"small_batch_rows": 0, "num_blocks": 256, **options},
    )


def prompts(count: int) -> list[str]:
    return [f"Der Server {number} ist" + " sehr" * (number % 5) for number in range(count)]


def run(
    engine: Engine,
    count: int,
    params: SamplingParams = PARAMS,
    each_step: Callable[[int], None] = lambda _: None,
) -> list[Completion]:
    """Run `count` prompts together and call `each_step` with the number of steps so far."""
    request_ids = [engine.add(prompt, params) for prompt in prompts(count)]
    done: dict[int, Completion] = {}
    steps = 0
    while len(done) < count:
        outputs = engine.step()
        done |= {o.request_id: o.completion for o in outputs if o.completion}
        steps += 1
        each_step(steps)
    return [done[request_id] for request_id in request_ids]


def hashes(completions: list[Completion]) -> list[str | None]:
    assert all(one.logits_sha256 for one in completions)
    return [one.logits_sha256 for one in completions]


@pytest.fixture(scope="session")
def alone() -> Iterator[Engine]:
    engine = Engine(config(1))
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def _four() -> Iterator[tuple[Engine, Heard]]:
    heard = Heard()
    options = {"heartbeat_timeout_s": 2.0, "migration_deadline_s": 2.0, "drill": True}
    engine = Engine(config(4, **options), sink=heard)
    yield engine, heard
    engine.close()


@pytest.fixture
def four(_four: tuple[Engine, Heard]) -> tuple[Engine, Heard]:
    engine, heard = _four
    for rank in {0, 1, 2, 3} - engine.ranks.keys():
        rejoin(engine, rank)
    engine.control.set_exchange("grouped")
    heard.events.clear()
    return engine, heard
