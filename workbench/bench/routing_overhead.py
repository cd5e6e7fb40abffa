"""What share of a decode step goes into deciding, by batch, with each way to save it switched off.

    share = (plan + select + place + sort + format) ms / step ms, without the gate's product

The engine's own always-on sums (`engine.runtime.deciding`) are read around each step; nobody
listens, so nothing is recorded. The ways take turns step by step on one engine and the same
sequences, so that whatever else the machine does hits all of them:

    all          as the engine runs
    no look-ups  place and sort are worked out for every step
    a lock       every decision of the gate takes a lock that a monitor's thread also takes
    not ahead    formats are predicted layer by layer and a draft's worth at each question, where
                 else all layers are predicted in one go at the step's start, and prices once a step
    no async     between ranks: the whole batch is ordered before any row leaves (`grouped`), where
                 else the second half is ordered while the first is under way (`overlapped`)

No thread decides beside a step, so all of this time is on the step's critical path but for what
`overlapped` hides between ranks; it is in the sum all the same.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine import Engine, EngineConfig, SamplingParams
from engine.errors import RequestError
from engine.events import LEVELS
from engine.routing.balance import replicated
from engine.routing.cache import MAX_ROWS
from engine.routing.precision import FILE
from engine.runtime.deciding import overhead_state
from workbench.bench.decode import prompts_of
from workbench.bench.machine import report, torch_threads
from workbench.bench.random_model import LARGE, write

AIM_BATCH, AIM_SHARE = 32, 0.05
DEVICES = 4
"""Logical devices of the setting with replicas; each has room for one copy more."""
WAYS = ("all", "no look-ups", "a lock")
WAYS_AHEAD = ("all", "not ahead")
RANKS, WAYS_OF_RANKS = 2, ("all", "no async")
HELD_S, PAUSE_S = 50e-6, 500e-6
"""How long the monitor's thread holds the lock, and how long it rests."""
FORMULA = (
    "share = median over rounds of (ms of deciding, summed over the steps / ms of those steps); "
    "deciding = plan + select + place + sort + format, without the gate's product"
)


@dataclass(slots=True)
class Sums:
    """What the steps of one way in one round took."""

    step_ms: float = 0.0
    level_ms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LEVELS, 0.0))
    steps: int = 0
    hits: int = 0
    misses: int = 0

    def add(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Take the difference of two readings of the engine's sums."""
        self.step_ms += after["step_ms"] - before["step_ms"]
        for level in LEVELS:
            self.level_ms[level] += after["level_ms"][level] - before["level_ms"][level]
        self.hits += after["look_up_hits"] - before["look_up_hits"]
        self.misses += after["look_up_misses"] - before["look_up_misses"]
        self.steps += 1

    @property
    def share(self) -> float:
        """Of the steps' time."""
        return sum(self.level_ms.values()) / self.step_ms


def run(
    model: Path,
    *,
    batches: tuple[int, ...] = (1, 4, 8, 32, 128),
    steps: int = 24,
    rounds: int = 3,
    threads: int | None = 1,
    large: bool = True,
    draft: Path | None = None,
    ranks: bool = True,
) -> dict[str, Any]:
    """Measure one row per setting, batch and way.

    Args:
        model: folder.
        batches: numbers of sequences run together.
        steps: decode steps of each way in a round.
        rounds: how often each batch is run; medians are shown.
        threads: of one product; None leaves torch's setting.
        large: whether a random model of a large shape runs too.
        draft: folder of a draft model; its decisions are measured too.
        ranks: whether two processes run too.

    Raises:
        RequestError: a number is below 1.
    """
    if min(*batches, steps, rounds) < 1:
        raise RequestError("batches, steps and rounds must be whole numbers of at least 1.")
    rows: list[dict[str, Any]] = []
    with torch_threads(threads):
        for setting, config in _settings(model, max(batches)).items():
            with closing(Engine(config)) as engine:
                if config.num_devices > 1:
                    replicate(engine)
                rows += _measure(engine, setting, WAYS, batches, steps, rounds)
        few, most = max(2, steps // 2), max(batches)
        if (model / FILE).is_file():
            config = EngineConfig(model=model, precision="auto", max_running=most)
            with closing(Engine(config)) as engine:
                rows += _measure(engine, "formats by unit", WAYS_AHEAD, batches, few, rounds)
        if draft is not None:
            config = EngineConfig(model=model, draft=draft, max_running=most)
            with closing(Engine(config)) as engine:
                rows += _measure(engine, "with a draft", WAYS_AHEAD, batches, few, rounds)
        if ranks:
            rows += _on_ranks(model, batches, few, rounds)
        if large:
            rows += _large(model, batches, steps, rounds)
    words = f"--batches {','.join(map(str, batches))} --steps {steps} --rounds {rounds}"
    words += f" --threads {threads}" if threads else ""
    words += "" if large else " --no-large"
    words += "" if draft is not None else " --no-draft"
    words += "" if ranks else " --no-ranks"
    command = f"workbench bench routing-overhead --model {model.name} {words} --json"
    with torch_threads(threads):  # the machine is described as it was
        return report(rows, command) | {"aim": _aim(rows), "notes": NOTES}


NOTES = [
    "The alarm at batch 1 is the small-batch lesson: most of deciding is the start of each "
    "operation, which costs one row nearly as much as thirty.",
    "The large shape is random weights in bf16: its experts have so much more to do that the same "
    "deciding is a small share at every batch.",
    f"Look-ups serve steps of at most {MAX_ROWS} rows: with more the same ids hardly meet again.",
    "Nothing is decided on another thread, so in one process the share of the critical path is the "
    "whole share; formats and drafts are predicted ahead, in line, and that time is in it.",
]


def _settings(model: Path, most: int) -> dict[str, EngineConfig]:
    def config(**options: Any) -> EngineConfig:
        return EngineConfig(
            model=model, max_running=most, max_step_tokens=max(256, most), **options
        )

    return {"one copy": config(), "replicas": config(num_devices=DEVICES)}


def replicate(engine: Engine) -> None:
    """Give each device room for one copy more, as if the first experts were the busiest."""
    import numpy as np

    table = engine.table
    falling_E = np.arange(table.num_experts, 0, -1)
    load_LE = np.tile(falling_E, (table.num_layers, 1))
    engine.control.publish_table(replicated(load_LE, table.num_devices, version=table.version + 1))


def _on_ranks(
    model: Path, batches: tuple[int, ...], steps: int, rounds: int
) -> list[dict[str, Any]]:
    """Measure processes that exchange rows; the times are the mean of the ranks'."""
    config = EngineConfig(
        model=model,
        num_ranks=RANKS,
        exchange="overlapped",
        small_batch_rows=0,
        max_running=max(batches),
    )
    with closing(Engine(config)) as engine:
        return _measure(engine, f"{RANKS} ranks", WAYS_OF_RANKS, batches, steps, min(2, rounds))


def _large(model: Path, batches: tuple[int, ...], steps: int, rounds: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        made = write(Path(folder) / f"random-{LARGE.experts}x{LARGE.width}", model, LARGE)
        most = max(batches)
        config = EngineConfig(
            model=made, dtype="bfloat16", max_running=most, max_step_tokens=max(256, most)
        )
        with closing(Engine(config)) as engine:
            name = f"large: {LARGE.words()}"
            few = max(3, steps // 4)
            return _measure(engine, name, WAYS[:2], batches, few, min(2, rounds))


def _measure(
    engine: Engine,
    setting: str,
    ways: tuple[str, ...],
    batches: tuple[int, ...],
    steps: int,
    rounds: int,
) -> list[dict[str, Any]]:
    rows = []
    for batch in batches:
        taken: dict[str, list[Sums]] = {way: [] for way in ways}
        for number in range(rounds + 1):
            sums = _round(engine, ways, batch, steps, first=number * batch)
            if number:  # the first round warms up
                for way in ways:
                    taken[way].append(sums[way])
        rows += [
            {"setting": setting, "batch": batch, "way": way} | _row(taken[way]) for way in ways
        ]
    return rows


def _row(rounds: list[Sums]) -> dict[str, Any]:
    share = statistics.median(sums.share for sums in rounds)

    def each(pick: Callable[[Sums], float]) -> float:
        return round(statistics.median(pick(sums) / sums.steps for sums in rounds), 4)

    hits, looked = sum(s.hits for s in rounds), sum(s.hits + s.misses for s in rounds)
    return {
        **{f"{level}_ms": each(lambda s, at=level: s.level_ms[at]) for level in LEVELS},  # type: ignore[misc]
        "deciding_ms": each(lambda s: sum(s.level_ms.values())),
        "step_ms": each(lambda s: s.step_ms),
        "share": round(share, 4),
        "state": overhead_state(share),
        "look_up_hit_rate": round(hits / looked, 3) if looked else None,
        "steps": sum(sums.steps for sums in rounds),
        "share_formula": FORMULA,
    }


def _round(
    engine: Engine, ways: tuple[str, ...], batch: int, steps: int, *, first: int
) -> dict[str, Sums]:
    """Decode `steps` steps of each way, in turns; returns what each took.

    Each round continues other texts, or look-ups would find what the last round left.
    """
    params = SamplingParams(max_tokens=len(ways) * steps + 4, ignore_eos=True)
    prompts = prompts_of(engine, first + batch)[first:]
    requests = [engine.add(prompt, params) for prompt in prompts]
    engine.step()
    while engine.stats().num_waiting:
        engine.step()
    sums = {way: Sums() for way in ways}
    with _monitor() as lock:
        for turn in range(len(ways) * steps):
            way = ways[turn % len(ways)]
            with _switched(engine, way, lock):
                before = engine.stats().deciding
                engine.step()
                sums[way].add(before, engine.stats().deciding)
            if not engine.has_work:
                break
    for request in requests:
        engine.abort(request)
    while engine.has_work:
        engine.step()
    return {way: one for way, one in sums.items() if one.steps}


@contextmanager
def _switched(engine: Engine, way: str, lock: _Monitor) -> Iterator[None]:
    """Run one step the given way."""
    if way == "no look-ups":
        engine.look_up(0)
    elif way == "not ahead":
        engine.predict_ahead(False)
    elif way == "no async":
        engine.control.set_exchange("grouped")
    elif way == "a lock":
        engine.control.inject("gate.lock", lock.taken, lease_s=60.0)
        lock.wanted.set()
    try:
        yield
    finally:
        if way == "no look-ups":
            engine.look_up(MAX_ROWS)
        elif way == "not ahead":
            engine.predict_ahead(True)
        elif way == "no async":
            engine.control.set_exchange("overlapped")
        elif way == "a lock":
            lock.wanted.clear()
            engine.control.clear("gate.lock")


class _Monitor:
    """A thread that reads routing's counts under a lock, as monitors should not."""

    def __init__(self) -> None:
        self.lock, self.over, self.wanted = threading.Lock(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def taken(self, value: Any) -> Any:
        """Pass the fault point `gate.lock` once the lock is free."""
        with self.lock:
            return value

    def stop(self) -> None:
        """End the thread."""
        self.over.set()
        self.wanted.set()
        self._thread.join()

    def _read(self) -> None:
        while not self.over.is_set():
            self.wanted.wait()
            with self.lock:
                time.sleep(HELD_S)
            time.sleep(PAUSE_S)


@contextmanager
def _monitor() -> Iterator[_Monitor]:
    monitor = _Monitor()
    try:
        yield monitor
    finally:
        monitor.stop()


def _aim(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Say whether deciding stays within the aim on the bundled model."""
    shares = [
        row["share"]
        for row in rows
        if row["way"] == "all" and row["batch"] >= AIM_BATCH and row["setting"] == "one copy"
    ]
    if not shares:
        return {"batch": AIM_BATCH, "share": AIM_SHARE}
    worst = max(shares)
    return {"batch": AIM_BATCH, "share": AIM_SHARE, "reached": worst, "met": worst <= AIM_SHARE}
