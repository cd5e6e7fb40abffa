"""Find which layers bear INT8 and which tokens suit it, by comparing full and mixed precision.

1. Run the text in full precision, then once for each layer with that layer alone in INT8.
2. A layer whose results jump away, or which alone costs much perplexity, goes on the whitelist.
3. In the others a token is *hurt* when INT8 there moves what the last layer puts out for it
   further than for nine tokens in ten. A feature becomes a limit if the tokens it shuts out are
   hurt clearly more often than the rest; one that does not help is left open, and that is kept.
4. Run mixed; while it costs more perplexity than allowed, the dearest layer joins the whitelist.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine import Engine
from engine.routing.precision import (
    CLASSES,
    Check,
    LayerThresholds,
    Thresholds,
    classes_of,
)
from workbench.precision.probe import Float, Pass, relative, run

Say = Callable[[str], None]

HURT = 0.9
"""A token is hurt when it is moved further than this share of all."""
CLEARLY = 1.5
"""Times as often as the rest tokens must be hurt for a feature to shut them out."""
TAIL = 0.1
"""Share of tokens that a limit on margin or range shuts out."""
FEWEST = 40
"""Tokens of a class that are needed to judge it."""
FIRST_POSITIONS = 8
"""Positions at the start of a text that may be shut out together."""
JUMP = 2.0
"""Times the median of all layers that a sensitive layer is further off."""
SAMPLE_UNITS = 256
"""One row of every so many INT8 units is run in both formats."""
BEYOND = 1.5
"""Times what was seen that a result may differ before its unit is run again."""


@dataclass(frozen=True, slots=True)
class Alone:
    """What one layer alone in INT8 did."""

    perplexity_rise: float
    """Over full precision, as a share."""
    damage_T: Float
    """(T,) how far each token's last hidden state moved, relative."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """What is known of the T tokens before any layer."""

    classes_T: npt.NDArray[np.uint8]
    positions_T: npt.NDArray[np.int64]


def calibrate(
    engine: Engine,
    windows: list[list[int]],
    *,
    weights_sha256: str,
    unit: str = "expert",
    unit_rows: int = 16,
    max_rise: float = 0.01,
    say: Say = lambda text: None,
) -> tuple[Thresholds, dict[str, Any]]:
    """Return thresholds for the engine's model, and what they were found from.

    Args:
        engine: opened with precision auto; what is in force is changed.
        windows: token ids of the text to measure on.
        weights_sha256: of the model.
        unit: kind of unit, one of `engine.routing.precision.KINDS`.
        unit_rows: rows of a unit.
        max_rise: allowed rise of perplexity, as a share.
        say: is told what goes on.
    """
    num_layers = len(engine.model_config.moe_layers)
    base = Thresholds.open(
        num_layers, weights_sha256=weights_sha256, unit=unit, unit_rows=unit_rows
    )
    engine.control.set_precision("model", base)
    full = run(engine, windows, errors=True, hidden=True)
    say(f"full precision: perplexity {full.perplexity:.4f} on {len(full.nll)} tokens")
    alone = []
    for layer in range(num_layers):
        alone.append(_alone(engine, base, full, windows, layer))
        say(f"layer {layer} alone in INT8: {alone[-1].perplexity_rise:+.3%} perplexity")
    tokens = _tokens(engine, windows)
    medians = [float(np.median(np.concatenate(seen.errors))) for seen in full.layers]
    layers, findings = [], []
    for layer in range(num_layers):
        limits, found = _limits(full, alone[layer], tokens, layer, medians, max_rise)
        layers.append(limits)
        findings.append(found)
    chosen = replace(base, layers=tuple(layers), sample_units=SAMPLE_UNITS)
    chosen, mixed = _within(engine, windows, chosen, alone, full, max_rise, say)
    engine.control.set_precision("auto", chosen)
    return chosen, {
        "tokens": len(full.nll),
        "perplexity_full": full.perplexity,
        "perplexity_mixed": mixed.perplexity,
        "perplexity_rise": mixed.perplexity / full.perplexity - 1,
        "int8_share_of_units": mixed.int8_share,
        "layers": findings,
    }


def _alone(
    engine: Engine, base: Thresholds, full: Pass, windows: list[list[int]], layer: int
) -> Alone:
    only = tuple(LayerThresholds(whitelist=other != layer) for other in range(len(base.layers)))
    engine.control.set_precision("auto", replace(base, layers=only))
    mixed = run(engine, windows, hidden=True)
    last, exact = mixed.layers[-1].hidden, full.layers[-1].hidden
    damage_T = relative(torch.cat(last), torch.cat(exact)).numpy()
    return Alone(mixed.perplexity / full.perplexity - 1, damage_T)


def _tokens(engine: Engine, windows: list[list[int]]) -> Tokens:
    vocabulary = range(engine.model_config.vocab_size)
    classes_V = classes_of(map(engine.tokenizer.token_bytes, vocabulary))
    ids = np.concatenate([np.array(window[:-1]) for window in windows])
    positions = np.concatenate([np.arange(len(window) - 1) for window in windows])
    return Tokens(classes_V[ids], positions)


def _limits(
    full: Pass,
    alone: Alone,
    tokens: Tokens,
    layer: int,
    medians: list[float],
    max_rise: float,
) -> tuple[LayerThresholds, dict[str, Any]]:
    """Return one layer's limits, and for each feature what it was judged by."""
    errors_T = np.concatenate(full.layers[layer].errors)
    ranges_T = np.concatenate(full.layers[layer].ranges)
    damage_T = alone.damage_T
    hurt_T = damage_T > np.quantile(damage_T, HURT)
    judged: dict[str, Any] = {
        "class": {
            name: _times(hurt_T, tokens.classes_T == number)
            for number, name in enumerate(CLASSES)
            if (tokens.classes_T == number).sum() >= FEWEST
        },
        "first_positions": {
            str(end): _times(damage_T, tokens.positions_T < end)
            for end in range(1, FIRST_POSITIONS + 1)
        },
    }
    limits = LayerThresholds(
        full_classes=tuple(n for n, times in judged["class"].items() if times >= CLEARLY),
        min_position=max(
            (int(end) for end, times in judged["first_positions"].items() if times >= CLEARLY),
            default=0,
        ),
        check=Check(
            max_range=round(BEYOND * float(ranges_T.max()), 3),
            max_error=round(BEYOND * float(errors_T.max()), 4),
        ),
    )
    if layer:
        before = full.layers[layer - 1]
        margins_T, before_T = np.concatenate(before.margins), np.concatenate(before.ranges)
        low, high = np.quantile(margins_T, TAIL), np.quantile(before_T, 1 - TAIL)
        judged["margin_below"] = {"limit": float(low), "times": _times(hurt_T, margins_T < low)}
        judged["range_above"] = {"limit": float(high), "times": _times(hurt_T, before_T > high)}
        if judged["margin_below"]["times"] >= CLEARLY:
            limits = replace(limits, min_margin=round(float(low), 4))
        if judged["range_above"]["times"] >= CLEARLY:
            limits = replace(limits, max_range=round(float(high), 4))
    whitelist, why = _sensitive(alone, errors_T, medians, max_rise)
    found = {
        "layer": layer,
        "perplexity_rise_alone": alone.perplexity_rise,
        "error_median": float(np.median(errors_T)),
        "error_p99": float(np.quantile(errors_T, 0.99)),
        "moved_median": float(np.median(damage_T)),
        "moved_p99": float(np.quantile(damage_T, 0.99)),
        "hurt_times_as_often": judged,
    }
    return replace(limits, whitelist=whitelist, why=why), found


def _times(weight_T: npt.NDArray[Any], out_T: npt.NDArray[np.bool_]) -> float:
    """Return the mean weight of those shut out over that of the rest; 1 where one side is empty."""
    if out_T.all() or not out_T.any():
        return 1.0
    rest = float(weight_T[~out_T].mean())
    return float(weight_T[out_T].mean()) / rest if rest > 0 else float("inf")


def _sensitive(
    alone: Alone, errors_T: Float, medians: list[float], max_rise: float
) -> tuple[bool, str]:
    """Judge one layer by its own error and by what it costs alone."""
    typical, own = float(np.median(medians)), float(np.median(errors_T))
    allowed = max_rise / len(medians)
    told = f"results off by {own:.2%} (median), alone {alone.perplexity_rise:+.3%} perplexity"
    if not np.isfinite(own) or own > JUMP * typical:
        return True, f"{told}: further off than {JUMP:g} times the layers' median {typical:.2%}"
    if not alone.perplexity_rise <= allowed:
        return True, f"{told}: more than its share {allowed:.3%}"
    return False, told


def _within(
    engine: Engine,
    windows: list[list[int]],
    chosen: Thresholds,
    alone: list[Alone],
    full: Pass,
    max_rise: float,
    say: Say,
) -> tuple[Thresholds, Pass]:
    """Put the dearest layers on the whitelist until the mixture costs no more than allowed."""
    while True:
        engine.control.set_precision("auto", chosen)
        mixed = run(engine, windows)
        rise = mixed.perplexity / full.perplexity - 1
        say(f"mixed: {mixed.int8_share:.1%} of units in INT8, {rise:+.3%} perplexity")
        left = [at for at, limits in enumerate(chosen.layers) if not limits.whitelist]
        if rise <= max_rise or not left:
            return chosen, mixed
        dearest = max(left, key=lambda at: alone[at].perplexity_rise)
        why = f"{chosen.layers[dearest].why}: the dearest while the whole cost {rise:+.3%}"
        layers = list(chosen.layers)
        layers[dearest] = replace(layers[dearest], whitelist=True, why=why)
        chosen = replace(chosen, layers=tuple(layers))
