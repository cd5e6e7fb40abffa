"""Which experts were asked for more rows than their capacity, and how much was dropped?"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pandas as pd

from workbench.trace.trace import Trace, count_ids
from workbench.views.rows import chosen_rows
from workbench.views.tidy import LABEL, Column, table

DROPPED_FORMULA = "share = slots of the expert without a physical expert / slots that chose it"

DROPPED_COLUMNS = {
    "layer": Column("int64", "the model's layer number"),
    "expert": Column("int64", "logical expert"),
    "slots": Column("int64", "slots that chose the expert; a row has top_k"),
    "dropped": Column("int64", "of them, those that found no room: physical expert -1"),
    "share": Column("float64", "dropped / slots, 0 to 1; NaN for an expert nobody chose"),
    "label": LABEL,
}


def dropped_slots(
    trace: Trace, *, causes: Collection[str] | None = None, label: str = "recorded"
) -> pd.DataFrame:
    """Return one line per layer and expert, `DROPPED_COLUMNS`, by `DROPPED_FORMULA`.

    Four slots of expert 0 of which one has physical expert -1: 4, 1 and 0.25.

    Args:
        trace: what to read.
        causes: rows that count; the default takes all, for rows that ran again dropped too.
        label: where the numbers come from, see `workbench.views.tidy.LABELS`.

    Raises:
        ConfigError: an unknown cause or label.
    """
    rows, experts = chosen_rows(trace, causes), trace.start.num_experts
    ids_NLK = trace.columns["rows/topk_ids"][rows]
    lost_NLK = trace.columns["rows/phy_ids"][rows] < 0
    asked_LE = count_ids(ids_NLK, experts)
    dropped_LE = count_ids(np.where(lost_NLK, ids_NLK, -1), experts)
    layers = trace.start.moe_layers
    values = {
        "layer": np.repeat(layers, experts),
        "expert": np.tile(np.arange(experts), len(layers)),
        "slots": asked_LE.ravel(),
        "dropped": dropped_LE.ravel(),
        "share": (dropped_LE / np.where(asked_LE > 0, asked_LE, np.nan)).ravel(),
    }
    return table(DROPPED_COLUMNS, values, label)
