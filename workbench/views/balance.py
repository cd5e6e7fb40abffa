"""How even is the load? Several figures, because each hides something; each with its formula."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import numpy as np
import pandas as pd

from engine.errors import ConfigError
from workbench.trace.schema import Array
from workbench.trace.trace import Trace, count_ids
from workbench.views.devices import devices_of_pairs
from workbench.views.rows import ACCEPTED, chosen_rows
from workbench.views.tidy import LABEL, Column, join, table

BALANCE_FORMULAS = {
    "max_over_mean": "max(n) / mean(n); 1 is even, X all on one",
    "coefficient_of_variation": "sqrt(mean((n - mean(n))^2)) / mean(n); 0 is even",
    "gini": "sum |n_i - n_j| over all i, j / (2 X^2 mean(n)); 0 is even, 1 - 1/X all on one",
    "entropy": "-sum(p log p) / log X with p = n / sum(n); 1 is even, 0 all on one",
    "idle_share": "units with n = 0 / X; 0: all of them work",
}
"""By measure; n are the rows of X units, experts or devices."""

BALANCE_COLUMNS = {
    "layer": Column("int64", "the model's layer number"),
    "per": Column("str", "what n counts: rows by expert or by device"),
    "units": Column("int64", "number of experts or devices, X in the formula"),
    "measure": Column("str", "one of BALANCE_FORMULAS"),
    "value": Column("float64", "a ratio without unit; NaN in a layer without rows"),
    "formula": Column("str", "how the value is computed"),
    "label": LABEL,
}


def load_balance(
    trace: Trace,
    *,
    per: Literal["expert", "device"] = "expert",
    tables: Mapping[int, Sequence[int]] | None = None,
    causes: Collection[str] | None = ACCEPTED,
    label: str = "recorded",
) -> pd.DataFrame:
    """Return one line per layer and measure, `BALANCE_COLUMNS`.

    Args:
        trace: what to read.
        per: balance between logical experts, or between the devices that ran their rows.
        tables: `rank_of_phy` by table version, beside those in the trace; for devices only.
        causes: rows that count; the default leaves out rows that ran again, None takes all.
        label: where the numbers come from, see `workbench.views.tidy.LABELS`.

    Raises:
        ConfigError: an unknown cause, label or unit.
    """
    if per not in ("expert", "device"):
        raise ConfigError(f"per ({per!r}) must be 'expert' or 'device'.")
    kept = chosen_rows(trace, causes)
    if per == "expert":
        units = trace.start.num_experts
        counts_LX = count_ids(trace.columns["rows/topk_ids"][kept], units)
    else:
        units = trace.start.num_devices
        counts_LX = count_ids(devices_of_pairs(trace, tables)[kept], units)
    parts = []
    for layer, counts_X in zip(trace.start.moe_layers, counts_LX, strict=True):
        found = measures(counts_X)
        values = {
            "layer": [layer] * len(found),
            "per": [per] * len(found),
            "units": [units] * len(found),
            "measure": list(found),
            "value": list(found.values()),
            "formula": [BALANCE_FORMULAS[measure] for measure in found],
        }
        parts.append(table(BALANCE_COLUMNS, values, label))
    return join(BALANCE_COLUMNS, parts, label)


def measures(counts_X: Array) -> dict[str, float]:
    """Return every measure of `BALANCE_FORMULAS` for the counts; all NaN when they sum to 0.

    Counts [3, 1, 0, 0]: max/mean 3, variation sqrt(1.5) = 1.225, Gini 5/8 = 0.625,
    entropy 0.562 / 1.386 = 0.406, idle share 0.5.
    """
    counts = np.asarray(counts_X, np.float64)
    if counts.sum() == 0:
        return dict.fromkeys(BALANCE_FORMULAS, math.nan)
    size, mean = len(counts), counts.mean()
    rank = np.arange(1, size + 1)
    positive = counts[counts > 0] / counts.sum()
    entropy = -(positive * np.log(positive)).sum()
    return {
        "max_over_mean": float(counts.max() / mean),
        "coefficient_of_variation": float(counts.std() / mean),
        # The double sum of the formula, over counts in ascending order.
        "gini": float(((2 * rank - size - 1) * np.sort(counts)).sum() / (size**2 * mean)),
        "entropy": float(entropy / math.log(size)) if size > 1 else 1.0,
        "idle_share": float((counts == 0).mean()),
    }
