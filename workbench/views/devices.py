"""How much work does each device get? And: on which device did each slot of a row run?

A trace carries the physical expert of every pair. Where that one lives is known for the table the
engine started with and for every later table whose publication is in the trace; a caller may give
others. A pair under a table nobody knows stands under device -1.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pandas as pd

from workbench.trace.schema import Array
from workbench.trace.trace import Trace, count_ids
from workbench.views.load import load_values
from workbench.views.rows import ACCEPTED, chosen_rows, row_steps
from workbench.views.tidy import LABEL, Column, table

NOWHERE = -1
"""No expert, so no device."""
UNKNOWN = -2
"""A physical expert whose place is not known; tables show device -1 for it."""

DEVICE_LOAD_FORMULA = (
    "load = slots on the device / (slots of the layer on known devices / number of devices)"
)

DEVICE_LOAD_COLUMNS = {
    "layer": Column("int64", "the model's layer number"),
    "device": Column("int64", "device whose experts ran the rows"),
    "rows": Column("int64", "slots run there"),
    "share": Column("float64", "rows / rows of the layer, 0 to 1; NaN in a layer without rows"),
    "load": Column("float64", "share x devices; 1 is the fair share, 0 an idle device"),
    "label": LABEL,
}


def device_load(
    trace: Trace,
    *,
    tables: Mapping[int, Sequence[int]] | None = None,
    causes: Collection[str] | None = ACCEPTED,
    label: str = "recorded",
) -> pd.DataFrame:
    """Return one line per layer and device, `DEVICE_LOAD_COLUMNS`, by `DEVICE_LOAD_FORMULA`.

    Pairs whose device is not known are left out here; `device_traffic` shows how many there are.

    Args:
        trace: what to read.
        tables: `rank_of_phy` by table version, beside those in the trace.
        causes: rows that count; the default leaves out rows that ran again, None takes all.
        label: where the numbers come from, see `workbench.views.tidy.LABELS`.

    Raises:
        ConfigError: an unknown cause or label.
    """
    kept = chosen_rows(trace, causes)
    counts_LG = count_ids(devices_of_pairs(trace, tables)[kept], trace.start.num_devices)
    values = load_values(trace.start.moe_layers, "device", counts_LG)
    return table(DEVICE_LOAD_COLUMNS, values, label)


def devices_of_pairs(trace: Trace, tables: Mapping[int, Sequence[int]] | None = None) -> Array:
    """Return (N, L, K) int64 the device each pair ran on, `NOWHERE` or `UNKNOWN`.

    With `rank_of_phy` [0, 0, 1, 1], physical experts [[3, -1]] give [[1, NOWHERE]].
    """
    phy_NLK = trace.columns["rows/phy_ids"].astype(np.int64)
    devices_NLK = np.where(phy_NLK < 0, NOWHERE, UNKNOWN)
    versions_N = row_steps(trace, "table_version")
    for version, ranks in known_tables(trace, tables).items():
        ranks_P = np.asarray(ranks, np.int64)
        ranks_P = np.where((ranks_P >= 0) & (ranks_P < trace.start.num_devices), ranks_P, UNKNOWN)
        placed = (versions_N == version)[:, None, None] & (phy_NLK >= 0) & (phy_NLK < len(ranks_P))
        devices_NLK[placed] = ranks_P[phy_NLK[placed]]
    return devices_NLK


def known_tables(
    trace: Trace, tables: Mapping[int, Sequence[int]] | None = None
) -> dict[int, Sequence[int]]:
    """Return `rank_of_phy` by version: the start's, the published ones, then the caller's."""
    known: dict[int, Sequence[int]] = {trace.start.table_version: trace.start.rank_of_phy}
    for control in trace.controls:
        ranks = control.detail.get("rank_of_phy")
        if control.action == "publish_table" and isinstance(ranks, list | tuple):
            known[control.table_version] = ranks
    return known | dict(tables or {})
