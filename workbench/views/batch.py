"""How does the routing overhead depend on the batch?

A step's batch is its token rows. Deciding costs some time whatever the batch; below about eight
rows there is little work to set against it.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from workbench.trace.trace import Trace
from workbench.views.overhead import OVERHEAD_FORMULA, overhead_by_step, overhead_state
from workbench.views.tidy import LABEL, Column, join, table

BATCH_FORMULA = f"{OVERHEAD_FORMULA}, both summed over the steps of the batch size"

BATCH_COLUMNS = {
    "rows_from": Column("int64", "smallest batch of the line, rows a step: a power of two"),
    "rows_to": Column("int64", "largest batch of the line, rows a step"),
    "steps": Column("int64", "timed steps with such a batch"),
    "rows": Column("int64", "rows of those steps"),
    "routing_ms": Column("float64", "numerator: sum over those steps"),
    "step_ms": Column("float64", "denominator: sum over those steps"),
    "share": Column("float64", "routing_ms / step_ms, 0 to 1"),
    "share_p25": Column("float64", "lower quartile of the steps' own shares"),
    "share_p50": Column("float64", "median of the steps' own shares"),
    "share_p75": Column("float64", "upper quartile of the steps' own shares"),
    "routing_us_per_row": Column("float64", "routing_ms / rows, in microseconds"),
    "state": Column("str", "within, watch or redesign, by the overhead marks"),
    "label": LABEL,
}


def overhead_by_batch(
    trace: Trace, *, decode_only: bool = False, label: str = "recorded"
) -> pd.DataFrame:
    """Return one line per batch size 1, 2-3, 4-7, 8-15, …, `BATCH_COLUMNS`, by `BATCH_FORMULA`.

    Args:
        trace: what to read; steps without rows or times are left out, sizes without steps too.
        decode_only: leave out steps that also ran prompt rows, whose attention costs more.
        label: where the numbers come from, see `workbench.views.tidy.LABELS`.

    Raises:
        ConfigError: an unknown label.
    """
    steps = overhead_by_step(trace)
    kept = steps["share"].notna() & (steps["num_rows"] > 0)
    if decode_only:
        kept &= trace.columns["steps/num_prefill_rows"] == 0
    steps = steps[kept]
    sizes = np.floor(np.log2(steps["num_rows"].to_numpy())).astype(np.int64)
    parts = []
    for size in np.unique(sizes).tolist():
        own = steps[sizes == size]
        routing, whole, rows = (
            float(own[name].sum()) for name in ("routing_ms", "step_ms", "num_rows")
        )
        p25, p50, p75 = np.percentile(own["share"].to_numpy(), [25, 50, 75]).tolist()
        values = {
            "rows_from": [1 << size],
            "rows_to": [(2 << size) - 1],
            "steps": [len(own)],
            "rows": [int(rows)],
            "routing_ms": [routing],
            "step_ms": [whole],
            "share": [routing / whole],
            "share_p25": [p25],
            "share_p50": [p50],
            "share_p75": [p75],
            "routing_us_per_row": [1000 * routing / rows],
            "state": [overhead_state(routing / whole)],
        }
        parts.append(table(BATCH_COLUMNS, values, label))
    return join(BATCH_COLUMNS, parts, label)
