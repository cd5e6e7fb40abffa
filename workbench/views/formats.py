"""In which number formats does a layer run its rows, how often wrongly, and how far off?"""

from __future__ import annotations

import numpy as np
import pandas as pd

from workbench.trace.trace import Trace
from workbench.views.tidy import LABEL, Column, table

FORMAT_FORMULA = (
    "int8_share = int8_rows / rows, without those run again; a row is a token in one of its experts"
)

FORMAT_COLUMNS = {
    "layer": Column("int64", "the model's number of the layer"),
    "units": Column("int64", "units of rows that shared a format"),
    "int8_units": Column("int64", "of them, those voted to INT8"),
    "failed_units": Column("int64", "of them, those the check found predicted wrong"),
    "rows": Column("int64", "rows of all units"),
    "int8_rows": Column("int64", "rows that ended in INT8"),
    "rerun_rows": Column("int64", "rows run again in the engine's own format"),
    "sampled_rows": Column("int64", "rows run in both formats to compare"),
    "int8_share": Column("float64", "int8_rows / rows, 0 to 1"),
    "switches_per_100_rows": Column("float64", "changes of format from one row to the next"),
    "worst_error": Column("float64", "largest relative error of a sampled row; NaN: none sampled"),
    "label": LABEL,
}
_COUNTS = (
    *("units", "int8_units", "failed_units", "rows", "int8_rows", "rerun_rows", "sampled_rows"),
    "switches",
)


def unit_formats(trace: Trace, *, label: str = "recorded") -> pd.DataFrame:
    """Return one line per MoE layer over all steps, `FORMAT_COLUMNS`, by `FORMAT_FORMULA`.

    A trace whose formats were not chosen by unit gives no lines.

    Args:
        trace: what to read.
        label: where the numbers come from, see `workbench.views.tidy.LABELS`.

    Raises:
        ConfigError: an unknown label.
    """
    at = trace.columns["units/layer"]
    layers = np.unique(at)
    sums = {
        name: np.bincount(at, weights=trace.columns[f"units/{name}"], minlength=1)[layers]
        for name in _COUNTS
    }
    worst = [float(trace.columns["units/worst_error"][at == layer].max()) for layer in layers]
    rows = np.maximum(sums["rows"], 1)
    switches = sums.pop("switches")
    values = {
        "layer": [trace.start.moe_layers[layer] for layer in layers],
        **sums,
        "int8_share": sums["int8_rows"] / rows,
        "switches_per_100_rows": 100 * switches / rows,
        "worst_error": np.where(sums["sampled_rows"] > 0, worst, np.nan),
    }
    return table(FORMAT_COLUMNS, values, label)
