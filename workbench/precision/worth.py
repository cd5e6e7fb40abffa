"""What stored thresholds are worth: quality and speed together, in one report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from engine import Engine
from engine.routing.precision import Thresholds, classes_of
from engine.routing.precision.predictor import Predictor
from workbench.bench.machine import machine
from workbench.precision import quality, speed, texts
from workbench.precision.calibrate import Say


def parts(
    engine: Engine,
    heard: speed.Listener,
    thresholds: Thresholds,
    *,
    windows: int,
    length: int,
    rounds: int,
    say: Say = lambda text: None,
) -> Iterator[tuple[str, Any]]:
    """Measure on held-out text, part by part; without rounds nothing is timed.

    Args:
        engine: opened with precision auto.
        heard: its sink.
        thresholds: to be judged.
        windows: stretches of text of each domain.
        length: tokens of each.
        rounds: repetitions of the timing.
        say: is told what goes on.

    Yields:
        the name and the value of each part of the report, when it is ready.
    """
    by_domain = texts.windows(engine.tokenizer, "heldout", windows, length)
    yield "quality", quality.compare(engine, thresholds, by_domain, say)
    experts: list[dict[str, Any]] = []
    steps: dict[str, Any] = {}
    if rounds:
        prompts = [some[0] for some in by_domain.values()]
        layer, suits_T = typical(engine, thresholds, prompts)
        say("timing experts by themselves, by unit size")
        experts = speed.experts_by_size(suits_T, 2 * rounds, threads=engine.config.num_threads)
        yield "suits", {"layer": layer, "share_of_tokens": float(suits_T.mean())}
    yield "experts", experts
    if rounds:
        say("timing whole steps, by format and unit size")
        steps = speed.steps_by_size(engine, heard, thresholds, prompts, rounds)
        engine.control.set_precision("auto", thresholds)
    yield "steps", steps
    yield "verdict", speed.verdict(experts) if experts else ""
    yield "machine", machine()


def typical(
    engine: Engine, thresholds: Thresholds, prompts: list[list[int]]
) -> tuple[int, np.ndarray]:
    """Return the layer whose tokens differ most in what suits them, and which of them suit INT8.

    By class and position alone, which is what limits usually look at.
    """
    vocabulary = range(engine.model_config.vocab_size)
    classes_V = classes_of(map(engine.tokenizer.token_bytes, vocabulary))
    ids = np.concatenate([np.array(prompt[:-1]) for prompt in prompts])
    positions = np.concatenate([np.arange(len(prompt) - 1) for prompt in prompts])
    suits_LT = Predictor(thresholds).ahead(classes_V[ids], positions).suits_LT
    layer = int(np.abs(suits_LT.mean(axis=1) - 0.5).argmin())
    return layer, suits_LT[layer]


def plain(thresholds: Thresholds) -> dict[str, Any]:
    """Return thresholds as a JSON value."""
    return asdict(thresholds)
