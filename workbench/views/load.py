"""How much work does each expert get, layer by layer?"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pandas as pd

from workbench.trace.schema import Array
from workbench.trace.trace import Trace, count_ids
from workbench.views.rows import ACCEPTED, chosen_rows
from workbench.views.tidy import LABEL, Column, table

LOAD_FORMULA = "load = slots of the expert / (slots of its layer / number of experts)"

LOAD_COLUMNS = {
    "layer": Column("int64", "the model's layer number"),
    "expert": Column("int64", "logical expert"),
    "rows": Column("int64", "slots that chose the expert; a row has top_k"),
    "share": Column("float64", "rows / rows of the layer, 0 to 1; NaN in a layer without rows"),
    "load": Column("float64", "share x experts; 1 is the fair share, at most E / K"),
    "label": LABEL,
}


def expert_load(
    trace: Trace, *, causes: Collection[str] | None = ACCEPTED, label: str = "recorded"
) -> pd.DataFrame:
    """Return one line per layer and expert, `LOAD_COLUMNS`, by `LOAD_FORMULA`.

    Counts [3, 1, 0, 0] of one layer give shares [0.75, 0.25, 0, 0] and loads [3, 1, 0, 0].

    Args:
        trace: what to read.
        causes: rows that count; the default leaves out rows that ran again, None takes all.
        label: where the numbers come from, see `workbench.views.tidy.LABELS`.

    Raises:
        ConfigError: an unknown cause or label.
    """
    rows = trace.columns["rows/topk_ids"][chosen_rows(trace, causes)]
    counts_LE = count_ids(rows, trace.start.num_experts)
    return table(LOAD_COLUMNS, load_values(trace.start.moe_layers, "expert", counts_LE), label)


def load_values(layers: Sequence[int], unit: str, counts_LX: Array) -> dict[str, Any]:
    """Return the columns `layer`, `unit`, `rows`, `share` and `load` of X units in L layers."""
    num_units = counts_LX.shape[1]
    share_LX = shares(counts_LX)
    return {
        "layer": np.repeat(layers, num_units),
        unit: np.tile(np.arange(num_units), len(layers)),
        "rows": counts_LX.ravel(),
        "share": share_LX.ravel(),
        "load": share_LX.ravel() * num_units,
    }


def shares(counts_LX: Array) -> Array:
    """Return each count over the sum of its line; NaN where the sum is 0."""
    sums_L1 = counts_LX.sum(axis=1, keepdims=True).astype(np.float64)
    return counts_LX / np.where(sums_L1 > 0, sums_L1, np.nan)
