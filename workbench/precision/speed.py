"""How fast mixed formats are by the size of their units, and whether 8 to 16 rows are best here.

The experts alone, in three ways: all rows in one format; mixed as the engine does it, the rows of a
format gathered; and *run by run*, a new call wherever the format changes, which is what it would be
to switch kernels for each unit. Larger units vote more rows into INT8, so the same is timed with
every second unit in INT8, which leaves the switching alone. Then whole steps of the engine, with
what deciding takes. The sides of a comparison take turns, and each time is the best of all rounds:
what others do on the machine only adds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine import Engine, SamplingParams
from engine.events import Event, StepEvent
from engine.kernels.cpu_mixed import mixed_mlp, prepare_mixed
from engine.kernels.experts import ExpertWeights
from engine.kernels.permute import permute
from engine.kernels.quant import INT8, NATIVE
from engine.routing.precision import Thresholds
from engine.routing.precision.units import expert_sizes, vote_in_order

Float = npt.NDArray[np.float64]
SIZES = (1, 4, 8, 16, 32)
GUIDE = (8, 16)
"""What the guide calls best."""
NOISE = 0.03
"""Two times closer than this, as a share, are called equal."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer of experts to time."""

    name: str
    width: int
    inner: int
    experts: int
    top_k: int
    tokens: int


SHAPES = (
    Shape("bundled model, prefill", 256, 256, 8, 2, 256),
    Shape("bundled model, 32 decodes", 256, 256, 8, 2, 32),
    Shape("large, prefill", 1024, 2816, 8, 2, 256),
    Shape("large, 32 decodes", 1024, 2816, 8, 2, 32),
)


def experts_by_size(
    suits_T: npt.NDArray[np.bool_], rounds: int, *, threads: int | None = None
) -> list[dict[str, Any]]:
    """Time the experts of each shape by unit size, for tokens of which these suit INT8."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        return [_shape(shape, suits_T, rounds) for shape in SHAPES]
    finally:
        torch.set_num_threads(before)


def steps_by_size(
    engine: Engine, heard: Listener, thresholds: Thresholds, windows: list[list[int]], rounds: int
) -> dict[str, Any]:
    """Time whole steps, prefill of each window and decodes of all, by format and unit size.

    Args:
        engine: opened with precision auto.
        heard: its sink.
        thresholds: what chooses.
        windows: prompts.
        rounds: repetitions; each step's best is taken.
    """
    ways: dict[str, tuple[str, Thresholds]] = {
        "full": ("model", thresholds),
        "int8": ("int8", thresholds),
        **{f"auto {n}": ("auto", replace(thresholds, unit_rows=n)) for n in SIZES},
    }
    found: dict[str, dict[str, list[Float]]] = {
        phase: {way: [] for way in ways} for phase in ("prefill", "decode")
    }
    for turn in range(rounds + 1):
        for way, (mode, limits) in ways.items():
            engine.control.set_precision(mode, limits)
            for phase, times in _steps(engine, heard, windows).items():
                if turn:  # the first one warms up
                    found[phase][way].append(times)
    return {phase: _by_way(by_way) for phase, by_way in found.items()}


def _by_way(by_way: dict[str, list[Float]]) -> list[dict[str, Any]]:
    """Take each step's best over the rounds, then the mean of all steps."""
    best = {way: np.min(rounds, axis=0).mean(axis=0) for way, rounds in by_way.items()}
    return [
        {
            "way": way,
            "step_ms": float(step_ms),
            "format_ms": float(format_ms),
            "format_share": float(format_ms / step_ms),
            "times_full": float(step_ms / best["full"][0]),
        }
        for way, (step_ms, format_ms) in best.items()
    ]


class Listener:
    """A sink that keeps the steps heard since it was last emptied."""

    enabled = True

    def __init__(self) -> None:
        self.steps: list[StepEvent] = []

    def emit(self, event: Event) -> None:
        """Keep a step."""
        if isinstance(event, StepEvent):
            self.steps.append(event)


WAYS = (
    ("gathered_us", "as voted, gathered"),
    ("run_by_run_us", "as voted, run by run"),
    ("half_gathered_us", "every second unit in INT8, gathered"),
    ("half_run_by_run_us", "every second unit in INT8, run by run"),
)


def compare_sizes(shapes: Sequence[dict[str, Any]]) -> dict[str, list[tuple[str, str, float]]]:
    """Compare units of 8 to 16 rows with the best other size.

    Returns:
        by way: of each shape its name, the comparison in words, and how many times as long it takes
        one row at a time.
    """
    return {words: [_compared(shape, way) for shape in shapes] for way, words in WAYS}


def verdict(shapes: Sequence[dict[str, Any]]) -> str:
    """Say with numbers whether units of 8 to 16 rows are best here, a sentence for each way."""
    sentences = []
    for words, compared in compare_sizes(shapes).items():
        told = [f"{name}: {how}, one row at a time {one:.2f} times" for name, how, one in compared]
        sentences.append(f"8 to 16 rows, {words}: {'; '.join(told)}.")
    return " ".join(sentences)


def _compared(shape: dict[str, Any], way: str) -> tuple[str, str, float]:
    times = {row["unit_rows"]: row[way] for row in shape["by_size"]}
    guide = min(times[size] for size in GUIDE)
    outside = min((size for size in times if size not in GUIDE), key=lambda n: times[n])
    lead = times[outside] / guide - 1
    how = f"equal {outside}"
    if lead > NOISE:
        how = f"lead by {lead:.0%}"
    elif lead < -NOISE:
        how = f"lose to {outside} by {guide / times[outside] - 1:.0%}"
    return shape["name"], how, times[1] / guide


def _shape(shape: Shape, suits_T: npt.NDArray[np.bool_], rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    gate_up = torch.randn(shape.experts, 2 * shape.inner, shape.width) * shape.width**-0.5
    down = torch.randn(shape.experts, shape.width, shape.inner) * shape.inner**-0.5
    weights = ExpertWeights(gate_up.bfloat16(), down.bfloat16(), prepare_mixed)
    weights.refresh()
    ids_TK = torch.rand(shape.tokens, shape.experts).topk(shape.top_k).indices
    source_R, _, counts = permute(ids_TK, shape.experts)
    rows_RD = torch.randn(shape.tokens, shape.width).bfloat16()[source_R]
    suits_R = np.resize(suits_T, shape.tokens)[source_R.numpy()]
    experts = list(range(shape.experts))
    formats = {size: _formats(counts, suits_R, size) for size in SIZES}
    own = torch.zeros(len(rows_RD), dtype=torch.int8)
    int8 = torch.full_like(own, INT8)
    calls: dict[str, Callable[[], Tensor]] = {
        "full": lambda: mixed_mlp(rows_RD, counts, experts, weights, own),
        "int8": lambda: mixed_mlp(rows_RD, counts, experts, weights, int8),
    }
    for size, formats_R in formats.items():
        calls[f"gathered {size}"] = partial(mixed_mlp, rows_RD, counts, experts, weights, formats_R)
        runs = runs_of(counts, formats_R.numpy())
        calls[f"run by run {size}"] = partial(run_by_run, rows_RD, runs, weights)
        half_R = _in_turn(counts, size)
        calls[f"half gathered {size}"] = partial(
            mixed_mlp, rows_RD, counts, experts, weights, half_R
        )
        halves = runs_of(counts, half_R.numpy())
        calls[f"half run by run {size}"] = partial(run_by_run, rows_RD, halves, weights)
    times = _in_turns(calls, rounds)
    return {
        "name": shape.name,
        "rows": len(rows_RD),
        "full_us": times["full"],
        "int8_us": times["int8"],
        "by_size": [
            {
                "unit_rows": size,
                "int8_share_of_rows": float((formats_R == INT8).float().mean()),
                "switches": int((formats_R.diff() != 0).sum()),
                "gathered_us": times[f"gathered {size}"],
                "run_by_run_us": times[f"run by run {size}"],
                "half_gathered_us": times[f"half gathered {size}"],
                "half_run_by_run_us": times[f"half run by run {size}"],
            }
            for size, formats_R in formats.items()
        ],
    }


def _formats(counts: list[int], suits_R: npt.NDArray[np.bool_], size: int) -> Tensor:
    sizes = expert_sizes(counts, size)
    return torch.from_numpy(vote_in_order(sizes, suits_R).repeat(sizes))


def _in_turn(counts: list[int], size: int) -> Tensor:
    """Return formats that change from unit to unit, so that half of the rows are in INT8."""
    sizes = expert_sizes(counts, size)
    return torch.from_numpy((np.arange(len(sizes)) % 2).astype(np.int8).repeat(sizes))


Run = tuple[int, int, int, bool]
"""An expert, its rows from and to, and whether they run in INT8."""


def runs_of(counts: Sequence[int], formats_R: npt.NDArray[np.int8]) -> list[Run]:
    """Return the stretches of one expert and one format, in order.

    Counts ``[3, 1]`` with formats ``[0, 1, 1, 1]`` give ``(0, 0, 1, False)``, ``(0, 1, 3, True)``,
    ``(1, 3, 4, True)``.
    """
    group_R = np.arange(len(counts)).repeat(counts)
    breaks = np.flatnonzero((np.diff(group_R) != 0) | (np.diff(formats_R) != 0)) + 1
    edges = [0, *breaks.tolist(), len(formats_R)] if len(formats_R) else []
    return [
        (int(group_R[start]), start, end, bool(formats_R[start] == INT8))
        for start, end in zip(edges, edges[1:], strict=False)
    ]


def run_by_run(rows_RD: Tensor, runs: Sequence[Run], weights: ExpertWeights) -> Tensor:
    """Run each stretch by a call of its own, as kernels that are switched for each would."""
    out_RD = torch.empty_like(rows_RD)
    for expert, start, end, is_int8 in runs:
        formats = torch.full((end - start,), INT8 if is_int8 else NATIVE, dtype=torch.int8)
        out_RD[start:end] = mixed_mlp(rows_RD[start:end], [end - start], [expert], weights, formats)
    return out_RD


def _in_turns(calls: dict[str, Callable[[], Tensor]], rounds: int) -> dict[str, float]:
    """Return the best microseconds of each call."""
    seen: dict[str, list[float]] = {name: [] for name in calls}
    with torch.inference_mode():
        for turn in range(rounds + 2):
            for name, call in calls.items():
                began = time.perf_counter()
                call()
                if turn >= 2:  # oneDNN compiles in the first ones
                    seen[name].append(1e6 * (time.perf_counter() - began))
    return {name: min(times) for name, times in seen.items()}


def _steps(engine: Engine, heard: Listener, windows: list[list[int]]) -> dict[str, Float]:
    """Return by phase (S, 2): the milliseconds of each step, and those of deciding formats."""
    phases = {}
    heard.steps.clear()
    for ids in windows:
        engine.finish([engine.add(ids[:-1], SamplingParams(max_tokens=0))])
    phases["prefill"] = _times(heard.steps)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    prompts = [ids[:8] for ids in windows] * (-(-32 // len(windows)))
    wanted = [engine.add(ids, params) for ids in prompts[:32]]
    engine.step()
    heard.steps.clear()
    engine.finish(wanted)
    phases["decode"] = _times([step for step in heard.steps if not step.num_prefill_rows])
    return phases


def _times(steps: list[StepEvent]) -> Float:
    return np.array([[step.duration_ms, step.stage_ms.get("format", 0.0)] for step in steps])
