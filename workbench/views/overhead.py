"""What share of a step's time is spent deciding where tokens go?

The rule of the trade: above 5 % watch it, above 10 % rebuild the router. Only the sum over steps
says what routing costs; a short step may exceed the marks and cost nothing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pandas as pd

from engine.events import ROUTING_STAGES, STAGES
from workbench.trace.schema import Array
from workbench.trace.trace import Trace
from workbench.views.tidy import LABEL, Column, table

OVERHEAD_FORMULA = f"share = ({' + '.join(ROUTING_STAGES)}) ms / step ms"


class Mark(NamedTuple):
    """A line on the scale of the overhead share."""

    share: float
    """Above this, 0 to 1."""
    state: str
    meaning: str


MARKS = (
    Mark(0.05, "watch", "watch it"),
    Mark(0.10, "redesign", "rebuild the router"),
)

WITHIN, UNKNOWN = "within", "unknown"

OVERHEAD_COLUMNS = {
    "step": Column("int64", "number of the forward pass"),
    "time_s": Column("float64", "seconds since the epoch at the start of the step"),
    "num_rows": Column("int64", "token rows of the step"),
    "num_running": Column("int64", "requests running"),
    "table_version": Column("int64", "version of the routing table the step read"),
    **{
        f"{stage}_ms": Column("float64", f"milliseconds of {stage}; NaN: not reported")
        for stage in ROUTING_STAGES
    },
    "routing_ms": Column("float64", "numerator: the sum of those; NaN when none is reported"),
    "step_ms": Column("float64", "denominator: milliseconds of the step"),
    "share": Column("float64", "routing_ms / step_ms, 0 to 1; NaN without a time"),
    "state": Column("str", "within, watch, redesign or unknown, by MARKS"),
    "label": LABEL,
}

OVERHEAD_TOTAL_COLUMNS = {
    "steps": Column("int64", "steps with both times"),
    "routing_ms": Column("float64", "numerator: sum over those steps"),
    "step_ms": Column("float64", "denominator: sum over those steps"),
    "share": Column("float64", "routing_ms / step_ms, 0 to 1"),
    "state": Column("str", "within, watch or redesign, by MARKS"),
    "steps_watch": Column("int64", "steps above the first mark but not the second"),
    "steps_redesign": Column("int64", "steps above the second mark"),
    "label": LABEL,
}

MARK_COLUMNS = {
    "share": Column("float64", "the mark, 0 to 1"),
    "state": Column("str", "the state above it"),
    "meaning": Column("str", "what to do above it"),
}


def overhead_by_step(trace: Trace, *, label: str = "recorded") -> pd.DataFrame:
    """Return one line per step, `OVERHEAD_COLUMNS`, by `OVERHEAD_FORMULA`.

    Raises:
        ConfigError: an unknown label.
    """
    columns = trace.columns
    stage_ms = columns["steps/stage_ms"]
    routing_SG = stage_ms[:, [STAGES.index(stage) for stage in ROUTING_STAGES]]
    reported_S = ~np.isnan(routing_SG).all(axis=1)
    routing_S = np.where(reported_S, np.nansum(routing_SG, axis=1), np.nan)
    share_S = routing_S / _positive(columns["steps/duration_ms"])
    values = {
        "step": columns["steps/step"],
        "time_s": columns["steps/time_s"],
        "num_rows": np.diff(columns["steps/row_start"]),
        "num_running": columns["steps/num_running"],
        "table_version": columns["steps/table_version"],
        **{f"{stage}_ms": routing_SG[:, at] for at, stage in enumerate(ROUTING_STAGES)},
        "routing_ms": routing_S,
        "step_ms": columns["steps/duration_ms"],
        "share": share_S,
        "state": [overhead_state(share) for share in share_S.tolist()],
    }
    return table(OVERHEAD_COLUMNS, values, label)


def overhead_total(trace: Trace, *, label: str = "recorded") -> pd.DataFrame:
    """Return one line over all steps, `OVERHEAD_TOTAL_COLUMNS`; none without a timed step.

    Two steps of 1 ms with 0.2 ms of routing and 9 ms with 0.2 ms: (0.2 + 0.2) / (1 + 9) = 4 %,
    within the marks, though one step is above the second.

    Raises:
        ConfigError: an unknown label.
    """
    steps = overhead_by_step(trace)
    timed = steps[steps["share"].notna()]
    routing, whole = float(timed["routing_ms"].sum()), float(timed["step_ms"].sum())
    share = routing / whole if whole else math.nan
    values = {
        "steps": [len(timed)],
        "routing_ms": [routing],
        "step_ms": [whole],
        "share": [share],
        "state": [overhead_state(share)],
        "steps_watch": [int((timed["state"] == "watch").sum())],
        "steps_redesign": [int((timed["state"] == "redesign").sum())],
    }
    if timed.empty:
        values = {name: [] for name in values}
    return table(OVERHEAD_TOTAL_COLUMNS, values, label)


def overhead_marks() -> pd.DataFrame:
    """Return the marks as data, `MARK_COLUMNS`, lowest first."""
    frame = pd.DataFrame(MARKS)
    return frame.astype({name: column.dtype for name, column in MARK_COLUMNS.items()})


def overhead_state(share: float) -> str:
    """Return the state of the highest mark that `share` (0 to 1) exceeds; `unknown` for NaN."""
    if math.isnan(share):
        return UNKNOWN
    state = WITHIN
    for mark in MARKS:
        if share > mark.share:
            state = mark.state
    return state


def _positive(values: Array) -> Array:
    return np.where(values > 0, values, np.nan)
