"""How busy is each rank, and what does it wait for?"""

from __future__ import annotations

import numpy as np
import pandas as pd

from engine.config import EXCHANGES
from workbench.trace.trace import Trace
from workbench.views.tidy import LABEL, Column, table

RANK_FORMULA = "utilisation = busy / (busy + wait + transfer)"

RANK_COLUMNS = {
    "step": Column("int64", "number of the forward pass"),
    "time_s": Column("float64", "seconds since the epoch at the start of the step"),
    "rank": Column("int64", "who measured this"),
    "mode": Column("str", "how rows were exchanged, one of engine.config.EXCHANGES"),
    "rows": Column("int64", "slots its experts ran, over all layers"),
    "num_bytes": Column("int64", "bytes it sent to other ranks: rows, results and counts"),
    "messages": Column("int64", "messages it sent to other ranks"),
    "busy_ms": Column("float64", "milliseconds of the step without both waits"),
    "wait_ms": Column("float64", "milliseconds until the slowest rank had counted its rows"),
    "transfer_ms": Column("float64", "milliseconds of waiting for rows on their way"),
    "utilisation": Column("float64", "busy / (busy + wait + transfer), 0 to 1"),
    "label": LABEL,
}


def rank_times(trace: Trace, *, label: str = "recorded") -> pd.DataFrame:
    """Return one line per step and rank, `RANK_COLUMNS`, by `RANK_FORMULA`.

    All rows of a step take part, whatever their cause: this is about work, not tokens. A trace of
    one process has no lines.

    Raises:
        ConfigError: an unknown label.
    """
    columns = {name: trace.columns[f"ranks/{name}"] for name in _TAKEN}
    step_index, ranks = columns["step_index"], columns["rank"]
    busy, wait, transfer = (columns[name] for name in ("busy_ms", "wait_ms", "transfer_ms"))
    whole = busy + wait + transfer
    # What a rank's experts ran is what all ranks of the step, itself included, sent there.
    arrived_SD = np.zeros((trace.num_steps, trace.start.num_devices), np.int64)
    np.add.at(arrived_SD, step_index, columns["rows"])
    values = {
        "step": trace.columns["steps/step"][step_index],
        "time_s": trace.columns["steps/time_s"][step_index],
        "rank": ranks,
        "mode": [EXCHANGES[mode] for mode in columns["mode"]],
        "rows": arrived_SD[step_index, ranks],
        "num_bytes": columns["num_bytes"].sum(1),
        "messages": columns["messages"].sum(1),
        "busy_ms": busy,
        "wait_ms": wait,
        "transfer_ms": transfer,
        "utilisation": busy / np.where(whole > 0, whole, np.nan),
    }
    return table(RANK_COLUMNS, values, label)


_TAKEN = (
    "step_index",
    "rank",
    "mode",
    "rows",
    "num_bytes",
    "messages",
    "busy_ms",
    "wait_ms",
    "transfer_ms",
)
