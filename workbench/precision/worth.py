"""What stored thresholds are worth: quality and speed together, in one report."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from engine import Engine
from engine.routing.precision import Thresholds, classes_of
from engine.routing.precision.predictor import Predictor
from workbench.bench.machine import machine
from workbench.precision import quality, speed, texts


def report(
    engine: Engine,
    heard: speed.Listener,
    thresholds: Thresholds,
    *,
    windows: int,
    length: int,
    rounds: int,
) -> dict[str, Any]:
    """Measure on held-out text; without rounds nothing is timed.

    Args:
        engine: opened with precision auto.
        heard: its sink.
        thresholds: to be judged.
        windows: stretches of text of each domain.
        length: tokens of each.
        rounds: repetitions of the timing.
    """
    by_domain = texts.windows(engine.tokenizer, "heldout", windows, length)
    found: dict[str, Any] = {"quality": quality.compare(engine, thresholds, by_domain)}
    experts: list[dict[str, Any]] = []
    steps: dict[str, Any] = {}
    if rounds:
        prompts = [some[0] for some in by_domain.values()]
        layer, suits_T = typical(engine, thresholds, prompts)
        experts = speed.experts_by_size(suits_T, 2 * rounds, threads=engine.config.num_threads)
        steps = speed.steps_by_size(engine, heard, thresholds, prompts, rounds)
        engine.control.set_precision("auto", thresholds)
        found["suits"] = {"layer": layer, "share_of_tokens": float(suits_T.mean())}
    verdict = speed.verdict(experts) if experts else ""
    found |= {"experts": experts, "steps": steps, "verdict": verdict}
    return found | {"machine": machine()}


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
