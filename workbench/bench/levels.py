"""The four routing levels in one table, measured in a short run of the bundled models.

Expert and device are decided when it happens, precision and model beforehand. Each level has a run
of its own, with one sequence at a time; what is compared takes turns in it:

    expert      the experts' products of the chosen K against those of all E, for the same rows
    device      4 logical devices with replicas, look-ups on and off
    precision   experts in INT8 by unit against the engine's own number format
    model       with a draft against without, on the numbers domain
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from engine import Engine, EngineConfig, SamplingParams
from engine.config.checks import within
from engine.errors import MachineError
from engine.events import Event, StepEvent
from engine.routing.cache import MAX_ROWS
from engine.routing.precision import FILE
from workbench.bench.machine import report, torch_threads
from workbench.bench.routing_overhead import DEVICES, replicate

MOST_TOKENS, MOST_ROUNDS = 240, 1000
"""Twice so many tokens are written after a prompt, in models that take at most 512."""
PROMPT = "Der Server ist"
NUMBERS = "12 * 7 = "
LEVEL_KEYS = (
    "level",
    "timing",
    "decisions_per_s",
    "share_of_step",
    "hit_rate",
    "rows_rerun",
    "gain",
)
FORMULAS = {
    "decisions_per_s": "choices made per second of the steps: expert, a token's experts in one "
    "layer; device, a replica for one of them; precision, a format for one unit; model, a token "
    "proposed or not worth it",
    "share_of_step": "ms in the level's stages / ms of the steps of its run",
    "hit_rate": "device: look-ups answered / made; precision: units in INT8 that the check let "
    "pass / units in INT8; model: accepted / proposed; expert: nothing is predicted or looked up",
    "rows_rerun": "in its run: precision, expert rows run again; model, rejected drafts",
    "gain": "expert: step time if all experts ran / as it is; device: step time without look-ups / "
    "with; precision and model: tokens per second with / without",
}


def run(model: Path, draft: Path, *, tokens: int = 48, rounds: int = 2) -> dict[str, Any]:
    """Measure the four rows.

    Args:
        model: folder of the target.
        draft: folder of the draft model.
        tokens: new tokens of a sequence.
        rounds: sequences of each side of a comparison.

    Raises:
        ConfigError: a number is out of range.
        MachineError: the model has no experts.
    """
    within("tokens", tokens, 1, MOST_TOKENS)
    within("rounds", rounds, 1, MOST_ROUNDS)
    with torch_threads(1):
        rows = [
            *_expert_and_device(model, tokens, rounds),
            _precision(model, tokens, rounds),
            _model(model, draft, tokens, rounds),
        ]
    order = ("expert", "precision", "model", "device")
    rows.sort(key=lambda row: order.index(row["level"]))
    words = f"--model {model.name} --tokens {tokens} --rounds {rounds}"
    return report(rows, f"workbench levels {words} --json") | {"formulas": FORMULAS}


def _row(level: str, timing: str, **values: Any) -> dict[str, Any]:
    row = {"level": level, "timing": timing} | values
    return {key: _rounded(row.get(key)) for key in LEVEL_KEYS}


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def _expert_and_device(model: Path, tokens: int, rounds: int) -> list[dict[str, Any]]:
    with closing(Engine(EngineConfig(model=model, num_devices=DEVICES))) as engine:
        shape = engine.model_config
        if not shape.is_moe:
            raise MachineError(f"{model} has no experts, so there is nothing to route.")
        replicate(engine)
        _sequence(engine, PROMPT, 4)
        start, times = engine.stats().deciding, {True: list[float](), False: list[float]()}
        for _ in range(rounds):
            engine.add(PROMPT, SamplingParams(max_tokens=2 * tokens, ignore_eos=True))
            engine.step()
            for turn in range(2 * tokens - 1):
                looks = turn % 2 == 0
                engine.look_up(MAX_ROWS if looks else 0)
                before = engine.stats().deciding["step_ms"]
                engine.step()
                times[looks].append(engine.stats().deciding["step_ms"] - before)
        engine.look_up(MAX_ROWS)
        end = engine.stats().deciding
        step_ms = statistics.median(times[True])
        seconds = (end["step_ms"] - start["step_ms"]) / 1e3
        layers, num_rows = len(shape.moe_layers), rounds * 2 * tokens
        hits = end["look_up_hits"] - start["look_up_hits"]
        misses = end["look_up_misses"] - start["look_up_misses"]
        return [
            _row(
                "expert",
                "real-time",
                decisions_per_s=num_rows * layers / seconds,
                share_of_step=_share(start, end, "expert"),
                rows_rerun=0,
                gain=_gain_of_few(engine, step_ms),
            ),
            _row(
                "device",
                "real-time",
                decisions_per_s=num_rows * layers * shape.top_k / seconds,
                share_of_step=_share(start, end, "device"),
                hit_rate=hits / (hits + misses) if hits + misses else None,
                rows_rerun=0,
                gain=statistics.median(times[False]) / step_ms,
            ),
        ]


def _gain_of_few(engine: Engine, step_ms: float) -> float:
    """Return how much longer a step of one row were if all experts ran, by their own times."""
    shape = engine.model_config
    moe = engine.moe[0]
    row_1D = torch.randn(1, shape.hidden_size)
    taken = {}
    with torch.inference_mode():
        for count in (shape.top_k, shape.num_experts):
            ids_1K, times = torch.arange(count)[None], []
            for _ in range(50):
                (flight,) = moe.dispatcher.dispatch(row_1D, ids_1K, engine.table, 0, lambda _: None)
                rows_RD, handle = flight.arrive()
                began = time.perf_counter()
                moe.experts(rows_RD, handle)
                times.append(time.perf_counter() - began)
            taken[count] = 1e3 * statistics.median(times) * len(shape.moe_layers)
    return (step_ms + taken[shape.num_experts] - taken[shape.top_k]) / step_ms


def _precision(model: Path, tokens: int, rounds: int) -> dict[str, Any]:
    if not (model / FILE).is_file():  # nobody has calibrated this model
        return _row("precision", "predicted", rows_rerun=0)
    units = _Units()
    config = EngineConfig(model=model, dtype="bfloat16", precision="auto")
    with closing(Engine(config, sink=units)) as engine:

        def set_mode(on: bool) -> None:
            engine.control.set_precision("auto" if on else "model")

        found = _compare(engine, PROMPT, tokens, rounds, set_mode)
        with units.listening():
            set_mode(True)
            _sequence(engine, PROMPT, tokens)
    return _row(
        "precision",
        "predicted",
        decisions_per_s=units.made / max(1, units.steps) * found["steps_per_s"],
        share_of_step=_share(found["before"], found["after"], "precision"),
        hit_rate=1 - units.failed / units.int8 if units.int8 else None,
        rows_rerun=units.rerun,
        gain=found["gain"],
    )


def _model(model: Path, draft: Path, tokens: int, rounds: int) -> dict[str, Any]:
    plain_config, config = (EngineConfig(model=model, draft=d) for d in (None, draft))
    with closing(Engine(plain_config)) as plain, closing(Engine(config)) as engine:
        speeds: dict[bool, list[float]] = {True: [], False: []}
        before, rejected = engine.stats().deciding, 0
        for number in range(rounds + 1):
            for drafts, one in ((True, engine), (False, plain)):
                done, seconds = _sequence(one, NUMBERS, tokens)
                if number:  # the first round warms up
                    speeds[drafts].append(len(done.token_ids) / seconds)
                    rejected += done.extra_rows.get("rejected_draft", 0)
        after, figures = engine.stats().deciding, engine.stats().draft or {}
    seconds = (after["step_ms"] - before["step_ms"]) / 1e3
    return _row(
        "model",
        "predicted",
        decisions_per_s=figures.get("passes", 0) / seconds,
        share_of_step=_share(before, after, "model"),
        hit_rate=figures.get("acceptance"),
        rows_rerun=rejected,
        gain=statistics.median(speeds[True]) / statistics.median(speeds[False]),
    )


def _compare(engine: Engine, prompt: str, tokens: int, rounds: int, switch: Any) -> dict[str, Any]:
    """Run a prompt with a level on and off, in turns; the sums are those of the runs with it on."""
    speeds: dict[bool, list[float]] = {True: [], False: []}
    before = after = engine.stats().deciding
    steps_per_s = 0.0
    for number in range(rounds + 1):
        for on in (False, True):
            switch(on)
            before = engine.stats().deciding
            done, seconds = _sequence(engine, prompt, tokens)
            after = engine.stats().deciding
            if number:  # the first round warms up
                speeds[on].append(len(done.token_ids) / seconds)
                steps_per_s = tokens / seconds
    gain = statistics.median(speeds[True]) / statistics.median(speeds[False])
    return {"gain": gain, "before": before, "after": after, "steps_per_s": steps_per_s}


def _sequence(engine: Engine, prompt: str, tokens: int) -> tuple[Any, float]:
    began = time.perf_counter()
    (done,) = engine.generate([prompt], SamplingParams(max_tokens=tokens, ignore_eos=True))
    return done, time.perf_counter() - began


def _share(before: Mapping[str, Any], after: Mapping[str, Any], level: str) -> float:
    spent: float = after["level_ms"][level] - before["level_ms"][level]
    whole: float = after["step_ms"] - before["step_ms"]
    return spent / whole


class _Units:
    """A sink that counts units of number formats while it is asked to."""

    def __init__(self) -> None:
        self.enabled = False
        self.made = self.int8 = self.failed = self.rerun = self.steps = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Count meanwhile."""
        self.enabled = True
        try:
            yield
        finally:
            self.enabled = False

    def emit(self, event: Event) -> None:
        """Count one step's units."""
        if isinstance(event, StepEvent):
            self.steps += 1
            for layer in event.units:
                self.made += layer.units
                self.int8 += layer.int8_units
                self.failed += layer.failed_units
                self.rerun += layer.rerun_rows
