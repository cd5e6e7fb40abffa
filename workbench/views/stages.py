"""Where does the time of a step go?"""

from __future__ import annotations

import numpy as np
import pandas as pd

from engine.events import ROUTING_STAGES, STAGES
from workbench.trace.schema import Array
from workbench.trace.trace import Trace
from workbench.views.tidy import LABEL, Column, table

OTHER = "other"
"""What no stage accounts for: the step's duration minus its stages, so below 0 by a rounding."""

COMPUTING_STAGES = ("embed", "attention", "gate", "experts", "combine", "head")

STAGE_FORMULA = "share = ms of the stage / ms of the step; other = step - sum of the stages"

STAGE_COLUMNS = {
    "step": Column("int64", "number of the forward pass"),
    "time_s": Column("float64", "seconds since the epoch at the start of the step"),
    "num_rows": Column("int64", "token rows of the step"),
    "stage": Column("str", "one of engine.events.STAGES, or other"),
    "kind": Column("str", "routing, compute or rest"),
    "ms": Column("float64", "milliseconds, summed over layers; NaN: not reported"),
    "share": Column("float64", "ms / ms of the step, 0 to 1; NaN: not reported"),
    "label": LABEL,
}

STAGE_TOTAL_COLUMNS = {
    "stage": Column("str", "one of engine.events.STAGES, or other"),
    "kind": Column("str", "routing, compute or rest"),
    "steps": Column("int64", "steps that reported the stage"),
    "ms": Column("float64", "milliseconds over all steps"),
    "ms_per_step": Column("float64", "mean milliseconds over the steps that reported it"),
    "share": Column("float64", "ms / ms of all steps, 0 to 1"),
    "label": LABEL,
}


def stage_times(trace: Trace, *, label: str = "recorded") -> pd.DataFrame:
    """Return one line per step and stage, `STAGE_COLUMNS`, by `STAGE_FORMULA`.

    All rows of a step take part, whatever their cause: this is about time, not tokens.

    Raises:
        ConfigError: an unknown label.
    """
    names = (*STAGES, OTHER)
    ms_SG, duration_S = _stage_ms(trace)
    columns = trace.columns
    values = {
        "step": np.repeat(columns["steps/step"], len(names)),
        "time_s": np.repeat(columns["steps/time_s"], len(names)),
        "num_rows": np.repeat(np.diff(columns["steps/row_start"]), len(names)),
        "stage": list(names) * trace.num_steps,
        "kind": [stage_kind(stage) for stage in names] * trace.num_steps,
        "ms": ms_SG.ravel(),
        "share": (ms_SG / np.where(duration_S > 0, duration_S, np.nan)[:, None]).ravel(),
    }
    return table(STAGE_COLUMNS, values, label)


def stage_totals(trace: Trace, *, label: str = "recorded") -> pd.DataFrame:
    """Return one line per stage over all steps, `STAGE_TOTAL_COLUMNS`; no steps, no lines.

    Raises:
        ConfigError: an unknown label.
    """
    names = (*STAGES, OTHER) if trace.num_steps else ()
    ms_SG, duration_S = _stage_ms(trace)
    ms_G = np.nansum(ms_SG, axis=0)[: len(names)]
    steps_G = (~np.isnan(ms_SG)).sum(axis=0)[: len(names)]
    total = duration_S.sum()
    values = {
        "stage": list(names),
        "kind": [stage_kind(stage) for stage in names],
        "steps": steps_G,
        "ms": ms_G,
        "ms_per_step": ms_G / np.where(steps_G > 0, steps_G, np.nan),
        "share": ms_G / (total if total > 0 else np.nan),
    }
    return table(STAGE_TOTAL_COLUMNS, values, label)


def stage_kind(stage: str) -> str:
    """Say whether a stage decides (`routing`), computes (`compute`) or does the `rest`."""
    if stage in ROUTING_STAGES:
        return "routing"
    return "compute" if stage in COMPUTING_STAGES else "rest"


def _stage_ms(trace: Trace) -> tuple[Array, Array]:
    """Return (S, G + 1) milliseconds with the unaccounted last, and (S,) durations."""
    ms_SG, duration_S = trace.columns["steps/stage_ms"], trace.columns["steps/duration_ms"]
    other_S = duration_S - np.nansum(ms_SG, axis=1)
    return np.column_stack([ms_SG, other_S]), duration_S
