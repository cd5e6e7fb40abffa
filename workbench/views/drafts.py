"""Whose proposals does the target accept? By domain, and by place in the run of proposals."""

from __future__ import annotations

import numpy as np
import pandas as pd

from engine.events import CAUSES
from workbench.trace.schema import Array
from workbench.trace.trace import Trace
from workbench.views.rows import row_domains
from workbench.views.tidy import LABEL, Column, table

DRAFT_FORMULA = (
    "acceptance = accepted / proposed at that place; a proposal counts as accepted when it and all "
    "before it in its step were the target's own tokens"
)

DRAFT_COLUMNS = {
    "domain": Column("str", 'label of the request; "" where it had none or is not known'),
    "place": Column("int64", "place in the proposals of one step, from 1"),
    "proposed": Column("int64", "proposals at this place"),
    "accepted": Column("int64", "of them, those that stood"),
    "acceptance": Column("float64", "accepted / proposed, 0 to 1"),
    "label": LABEL,
}


def draft_acceptance(trace: Trace, *, label: str = "recorded") -> pd.DataFrame:
    """Return one line per domain and place, `DRAFT_COLUMNS`, by `DRAFT_FORMULA`.

    A trace without a draft gives no lines.

    Args:
        trace: what to read.
        label: where the numbers come from, see `workbench.views.tidy.LABELS`.

    Raises:
        ConfigError: an unknown label.
    """
    rows = np.flatnonzero(trace.columns["rows/drafted"])
    places, domains = places_of(trace)[rows], row_domains(trace)[rows]
    accepted = trace.columns["rows/causes"][rows] == CAUSES.index("accepted")
    keys = sorted(set(zip(domains.tolist(), places.tolist(), strict=True)))
    chosen = [(domains == domain) & (places == place) for domain, place in keys]
    proposed = np.array([mine.sum() for mine in chosen], np.int64)
    stood = np.array([accepted[mine].sum() for mine in chosen], np.int64)
    values = {
        "domain": [domain for domain, _ in keys],
        "place": [place for _, place in keys],
        "proposed": proposed,
        "accepted": stood,
        "acceptance": stood / proposed,
    }
    return table(DRAFT_COLUMNS, values, label)


def places_of(trace: Trace) -> Array:
    """Return (N,) each row's place in the proposals of its step, from 1; 0 for other rows.

    A sequence's proposals follow its last own token: rows marked 0 1 1 0 1 have places 0 1 2 0 1.
    """
    drafted = trace.columns["rows/drafted"] == 1
    at = np.arange(len(drafted))
    own = np.maximum.accumulate(np.where(drafted, -1, at)) if len(at) else at
    return np.where(drafted, at - own, 0)
