"""Tables that change hundreds of times under load: is each answer right, does memory stay flat.

One engine on ranks in deterministic mode, never without requests. A new table follows the last one
as soon as that is in force: experts on other ranks, with copies and without, at random. Every
completion's logit hash is held against that of the same prompt in peace. Afterwards, steps with few
requests or one, so that most ranks have no row, and all experts on one rank: every rank must still
join every collective.
"""

from __future__ import annotations

import random
import time
from collections import deque
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from engine import Engine, EngineConfig, SamplingParams
from engine.cluster.worker import resident_bytes
from engine.config import at_least
from engine.errors import ConfigError, MachineError
from engine.events import ControlEvent, Event
from engine.routing.balance import replicated
from engine.routing.placement import contiguous
from engine.routing.table import RoutingTable

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 16, 6, 6
RUNNING = 4
"""Requests under way at any time."""
TABLE_S = 60.0
"""Longest wait for one table."""
GROWTH = 0.02
"""Most growth of a process from the first mark to the last."""


@dataclass(slots=True)
class Tables:
    """A sink that counts tables: published with their canary's verdict, and given up."""

    enabled: bool = True
    published: int = 0
    given_up: list[str] = field(default_factory=list)
    moved_bytes: int = 0
    read_bytes: int = 0

    def emit(self, event: Event) -> None:
        """Count what became of a table."""
        if not isinstance(event, ControlEvent):
            return
        if event.action == "publish_table":
            self.published += 1
            self.moved_bytes += event.detail["from_ranks"]
            self.read_bytes += event.detail["from_checkpoint"]
        elif event.action == "give_up_table":
            self.given_up.append(event.detail["why"])


def run(
    model: Path, *, ranks: int = 4, rebalances: int = 500, first_mark: int = 100, idle: int = 1000
) -> dict[str, Any]:
    """Change the table `rebalances` times, then run `idle` steps with little to do.

    Args:
        model: folder of a Mixture-of-Experts model.
        ranks: processes.
        rebalances: tables.
        first_mark: after so many tables memory is looked at first; it is again after the last.
        idle: steps with few rows.

    Raises:
        ConfigError: a number is too small, or the model has no experts.
        MachineError: a table did not come into force in time.
    """
    at_least("first_mark", first_mark, 1)
    at_least("idle", idle, 0)
    if ranks < 2 or rebalances <= first_mark:
        raise ConfigError(
            f"ranks ({ranks}) must be at least 2, and rebalances ({rebalances}) more than "
            f"first_mark ({first_mark})."
        )
    tables = Tables()
    config = EngineConfig(
        model=model,
        num_ranks=ranks,
        deterministic=True,
        hash_logits=True,
        num_blocks=64,
        small_batch_rows=0,
    )
    with closing(Engine(config, sink=tables)) as engine:
        if not engine.model_config.is_moe:
            raise ConfigError(f"model {model} has no experts, so no table to change.")
        load = Load(engine)
        began, marks = time.perf_counter(), []
        for number in range(1, rebalances + 1):
            load.take_up(load.another_table())
            if number in (first_mark, rebalances):
                marks.append(resident(engine))
        seconds = time.perf_counter() - began
        after_tables = collectives(engine)
        load.idle(idle)
        after_idle = collectives(engine)
    return {"ranks": ranks, "seconds": round(seconds, 1)} | report(
        tables, load, marks, after_tables, after_idle
    )


def report(
    tables: Tables,
    load: Load,
    marks: list[dict[str, int]],
    after_tables: dict[str, int],
    after_idle: dict[str, int],
) -> dict[str, Any]:
    """Sum up: memory at the first and the last mark, collectives after tables and idle steps."""
    growth = {name: marks[-1][name] / marks[0][name] - 1 for name in marks[0]}
    return {
        "rebalances": tables.published,
        "given_up": tables.given_up,
        "moved_bytes": tables.moved_bytes,
        "read_bytes": tables.read_bytes,
        "completions": load.completions,
        "wrong_hashes": load.wrong,
        "resident_mib": [{k: round(v / 2**20, 1) for k, v in mark.items()} for mark in marks],
        "growth": {name: round(value, 4) for name, value in growth.items()},
        "flat": max(growth.values()) <= GROWTH,
        "collectives": after_tables,
        "collectives_after_idle": after_idle,
        "equal_collectives": len({*after_tables.values()}) == len({*after_idle.values()}) == 1,
        "label": "measured",
    }


class Load:
    """Requests that never end, and what they must give."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.rng = engine, random.Random(0)
        vocab = engine.model_config.vocab_size
        self.prompts = [
            [self.rng.randrange(3, vocab) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)
        ]
        self.params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
        done = engine.generate(self.prompts, self.params)
        self.wanted = [one.logits_sha256 for one in done]
        self.completions = self.wrong = 0
        self._under_way: dict[int, int] = {}
        self._turn = 0

    def take_up(self, table: RoutingTable) -> None:
        """Publish a table and step, with requests under way, until it is in force."""
        self.engine.control.publish_table(table)
        deadline = time.monotonic() + TABLE_S
        while self.engine.table.version < table.version:
            if time.monotonic() > deadline:
                raise MachineError(f"table {table.version} was not in force in {TABLE_S:g} s.")
            while len(self._under_way) < RUNNING:
                self._add()
            self._step()

    def idle(self, steps: int) -> None:
        """Run steps with one to three requests, all experts on rank 0."""
        now = self.engine.table
        table = contiguous(
            now.num_layers, now.num_experts, now.num_devices, version=now.version + 1, holders=[0]
        )
        self.take_up(table)
        until = self.engine.stats().steps + steps
        lengths: deque[int] = deque()
        while self.engine.stats().steps < until:
            lengths = lengths or deque(self.rng.choices((1, 1, 2, 3), k=64))
            while len(self._under_way) < lengths[0]:
                self._add()
            lengths.popleft()
            self._step()
        while self._under_way:
            self._step()

    def another_table(self) -> RoutingTable:
        """Return the next table: experts anywhere, each second time with copies."""
        now, rng = self.engine.table, np.random.default_rng(self.engine.table.version)
        version, ranks = now.version + 1, now.num_devices
        if version % 2:
            load_LE = rng.random((now.num_layers, now.num_experts)) ** 4 + 1e-3
            return replicated(load_LE, ranks, version=version)
        plain = contiguous(now.num_layers, now.num_experts, ranks)
        return plain.moved(rng.permutation(plain.rank_of_phy), version)

    def _add(self) -> None:
        index = self._turn % PROMPTS
        self._turn += 1
        self._under_way[self.engine.add(self.prompts[index], self.params)] = index

    def _step(self) -> None:
        for output in self.engine.step():
            if output.completion is not None:
                index = self._under_way.pop(output.request_id)
                self.completions += 1
                self.wrong += output.completion.logits_sha256 != self.wanted[index]


def resident(engine: Engine) -> dict[str, int]:
    """Return the memory of the controller and of each rank, in bytes."""
    ranks = {f"rank {rank}": found["resident_bytes"] for rank, found in engine.census().items()}
    return {"controller": resident_bytes(), **ranks}


def collectives(engine: Engine) -> dict[str, int]:
    """Return how many collectives each rank has joined."""
    return {f"rank {rank}": found["collectives"] for rank, found in engine.census().items()}
