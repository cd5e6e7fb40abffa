"""How often are a step's placements and orders found in tables of earlier ones? By rows of a step.

Which replicas a few rows take, and their order by expert, follow from a handful of ids that come
again and again; with more rows the same ids hardly ever meet again.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from workbench.trace.trace import Trace
from workbench.views.tidy import LABEL, Column, table

LOOK_UP_FORMULA = "share = answers found in tables of earlier steps / answers looked up"

LOOK_UP_COLUMNS = {
    "rows": Column("int64", "token rows of a step"),
    "steps": Column("int64", "steps of so many rows in which something was looked up"),
    "found": Column("int64", "placements and orders that were found"),
    "missed": Column("int64", "those that were looked up and worked out"),
    "share": Column("float64", "found / (found + missed), 0 to 1"),
    "label": LABEL,
}


def look_ups(trace: Trace, *, label: str = "recorded") -> pd.DataFrame:
    """Return one line per number of rows, `LOOK_UP_COLUMNS`, by `LOOK_UP_FORMULA`.

    Steps in which nothing was looked up are left out. Two steps of one row with 4 found and none
    missed, and 2 found and 2 missed: 6 found, 2 missed, 0.75.

    Raises:
        ConfigError: an unknown label.
    """
    columns = trace.columns
    found_S, missed_S = columns["steps/look_ups_found"], columns["steps/look_ups_missed"]
    asked_S = found_S + missed_S > 0
    rows_S = np.diff(columns["steps/row_start"])
    sizes = np.unique(rows_S[asked_S])
    own = [asked_S & (rows_S == size) for size in sizes]
    found = np.array([found_S[mine].sum() for mine in own], np.int64)
    missed = np.array([missed_S[mine].sum() for mine in own], np.int64)
    values = {
        "rows": sizes,
        "steps": [int(mine.sum()) for mine in own],
        "found": found,
        "missed": missed,
        "share": found / (found + missed),
    }
    return table(LOOK_UP_COLUMNS, values, label)
