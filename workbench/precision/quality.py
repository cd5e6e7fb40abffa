"""What a mixture of formats costs in quality, on text held out: layer by layer, and in the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from engine import Engine
from engine.routing.precision import KINDS, Thresholds
from workbench.precision.calibrate import Say
from workbench.precision.probe import Pass, relative, run

SIZES = (8, 16)
"""Units that the guide names."""


def compare(
    engine: Engine,
    thresholds: Thresholds,
    by_domain: Mapping[str, list[list[int]]],
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """Return perplexities in full precision, all in INT8 and mixed, errors by layer, and shares.

    `error` of a layer is how far its experts alone are off in INT8 on the same input, `moved` how
    far what the layer puts out, with all that came before, has moved from full precision. `say` is
    told what goes on.
    """
    windows = [window for some in by_domain.values() for window in some]
    num_tokens = sum(len(window) - 1 for window in windows)
    say(f"running {num_tokens} tokens held out in full precision, all in INT8, and mixed")
    engine.control.set_precision("model", thresholds)
    full = run(engine, windows, errors=True, hidden=True)
    engine.control.set_precision("int8")
    int8 = run(engine, windows, hidden=True)
    engine.control.set_precision("auto")
    mixed = run(engine, windows, hidden=True)
    domains = np.repeat(
        list(by_domain), [sum(len(w) - 1 for w in some) for some in by_domain.values()]
    )
    say(f"running them by kind and size of unit: {' and '.join(KINDS)}, {SIZES[0]} and {SIZES[1]}")
    kinds = [
        _units(engine, thresholds, windows, full, kind, size) for kind in KINDS for size in SIZES
    ]
    engine.control.set_precision("auto", thresholds)
    return {
        "tokens": len(full.nll),
        "perplexity": {
            "full": full.perplexity,
            "int8": int8.perplexity,
            "mixed": mixed.perplexity,
            "int8_rise": int8.perplexity / full.perplexity - 1,
            "mixed_rise": mixed.perplexity / full.perplexity - 1,
        },
        "perplexity_by_domain": {
            name: {
                way: float(np.exp(one.nll[domains == name].mean(dtype=np.float64)))
                for way, one in (("full", full), ("int8", int8), ("mixed", mixed))
            }
            for name in by_domain
        },
        "int8_share_of_units": mixed.int8_share,
        "units": {
            name: mixed.total(name)
            for name in (
                *("units", "int8_units", "failed_units", "rows", "int8_rows"),
                *("rerun_rows", "sampled_rows", "switches"),
            )
        },
        "layers": [
            _layer(full, int8, mixed, thresholds, layer) for layer in range(len(full.layers))
        ],
        "kinds": kinds,
    }


def _layer(
    full: Pass, int8: Pass, mixed: Pass, thresholds: Thresholds, layer: int
) -> dict[str, Any]:
    errors = np.concatenate(full.layers[layer].errors)
    exact = torch.cat(full.layers[layer].hidden)
    moved = {
        name: relative(torch.cat(one.layers[layer].hidden), exact).numpy()
        for name, one in (("int8", int8), ("mixed", mixed))
    }
    units = mixed.layers[layer].units
    total = sum(unit.units for unit in units)
    return {
        "layer": layer,
        "whitelist": thresholds.layers[layer].whitelist,
        "int8_share_of_units": sum(unit.int8_units for unit in units) / total if total else 0.0,
        "error_median": float(np.median(errors)),
        "error_p99": float(np.quantile(errors, 0.99)),
        "moved_int8_median": float(np.median(moved["int8"])),
        "moved_int8_p99": float(np.quantile(moved["int8"], 0.99)),
        "moved_mixed_median": float(np.median(moved["mixed"])),
        "moved_mixed_p99": float(np.quantile(moved["mixed"], 0.99)),
    }


def _units(
    engine: Engine,
    thresholds: Thresholds,
    windows: list[list[int]],
    full: Pass,
    kind: str,
    size: int,
) -> dict[str, Any]:
    """Return what one kind and size of unit brings."""
    engine.control.set_precision("auto", replace(thresholds, unit=kind, unit_rows=size))
    found = run(engine, windows)
    rows = max(1, found.total("rows"))
    return {
        "unit": kind,
        "unit_rows": size,
        "int8_share_of_units": found.int8_share,
        "int8_share_of_rows": found.total("int8_rows") / rows,
        "switches_per_100_rows": 100 * found.total("switches") / rows,
        "perplexity_rise": found.perplexity / full.perplexity - 1,
    }
