"""How often do neighbouring tokens of one sequence choose other experts?

Frequent jumps make the traffic between devices change from token to token. How many are many
depends on the load: with 8 experts evenly loaded, unrelated tokens differ in 7 of 8 cases. So every
rate comes with the rate that unrelated tokens would have.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pandas as pd

from workbench.trace.schema import Array
from workbench.trace.trace import Trace
from workbench.views.rows import ACCEPTED, chosen_rows, row_domains
from workbench.views.tidy import LABEL, Column, join, table

ALL = "all"
"""Stands in `domain` for all domains together."""

JUMP_FORMULA = (
    "rate = pairs of neighbouring tokens whose choices differ / pairs; expected = the same for two "
    "tokens of the layer drawn at random without replacement, 1 - sum(n (n - 1)) / (N (N - 1)) "
    "over the counts n of the N tokens' choices"
)

JUMP_COLUMNS = {
    "domain": Column("str", 'label of the request, or "all"'),
    "layer": Column("int64", "the model's layer number"),
    "choice": Column("str", '"set": the K experts in any order; "first": the best one'),
    "pairs": Column("int64", "pairs of neighbouring tokens, each with at least one expert"),
    "jumps": Column("int64", "pairs whose choices differ"),
    "rate": Column("float64", "jumps / pairs, 0 to 1; NaN without pairs"),
    "expected": Column("float64", "rate of unrelated tokens with the same load; NaN below 2"),
    "label": LABEL,
}


def jump_rate(
    trace: Trace,
    *,
    by_domain: bool = False,
    causes: Collection[str] | None = ACCEPTED,
    label: str = "recorded",
) -> pd.DataFrame:
    """Return one line per layer and choice, `JUMP_COLUMNS`, by `JUMP_FORMULA`.

    First experts 0 0 1 1 of one sequence: 3 pairs, 1 jump, rate 1/3; expected
    1 - (2 + 2) / (4 x 3) = 2/3, so its neighbours agree more than unrelated tokens would.

    Args:
        trace: what to read. Neighbours have positions p and p + 1 of one request; positions the
            trace lacks make no pair.
        by_domain: lines for each domain, with its own expected rate, in place of `all`.
        causes: rows that count; the default leaves out rows that ran again. Of several rows of
            one position the last counts.
        label: where the numbers come from, see `workbench.views.tidy.LABELS`.

    Raises:
        ConfigError: an unknown cause or label.
    """
    rows = _in_order(trace, np.flatnonzero(chosen_rows(trace, causes)))
    if not by_domain:
        return join(JUMP_COLUMNS, _lines(trace, ALL, rows, label) if len(rows) else [], label)
    domains = row_domains(trace)[rows]
    parts = []
    for domain in sorted(set(domains.tolist())):
        parts += _lines(trace, domain, rows[domains == domain], label)
    return join(JUMP_COLUMNS, parts, label)


def _in_order(trace: Trace, rows: Array) -> Array:
    """Sort rows by request and position, keeping the last run of each token."""
    requests = trace.columns["rows/request_ids"][rows]
    positions = trace.columns["rows/positions"][rows]
    order = np.lexsort((positions, requests))
    rows, requests, positions = rows[order], requests[order], positions[order]
    newer = (requests[1:] == requests[:-1]) & (positions[1:] == positions[:-1])
    return rows[~np.append(newer, False)] if len(rows) else rows


def _lines(trace: Trace, domain: str, rows: Array, label: str) -> list[pd.DataFrame]:
    """Return the lines of the tokens `rows`, which are in the order of their sequences."""
    requests = trace.columns["rows/request_ids"][rows]
    positions = trace.columns["rows/positions"][rows].astype(np.int64)
    next_to = (requests[1:] == requests[:-1]) & (np.diff(positions) == 1)
    parts = []
    for index, layer in enumerate(trace.start.moe_layers):
        ids_NK = trace.columns["rows/topk_ids"][rows, index].astype(np.int64)
        any_N = (ids_NK >= 0).any(axis=1)
        pairs_N = next_to & any_N[1:] & any_N[:-1]
        for choice, codes_N in (("set", _sets(ids_NK)), ("first", _firsts(ids_NK))):
            pairs = int(pairs_N.sum())
            jumps = int((codes_N[1:] != codes_N[:-1])[pairs_N].sum())
            values = {
                "domain": [domain],
                "layer": [layer],
                "choice": [choice],
                "pairs": [pairs],
                "jumps": [jumps],
                "rate": [jumps / pairs if pairs else np.nan],
                "expected": [expected_rate(codes_N[any_N])],
            }
            parts.append(table(JUMP_COLUMNS, values, label))
    return parts


def _sets(ids_NK: Array) -> Array:
    """Number the different sets of experts; (N,)."""
    _, codes = np.unique(np.sort(ids_NK, axis=1), axis=0, return_inverse=True)
    return codes.reshape(-1)


def _firsts(ids_NK: Array) -> Array:
    """Return the best expert of each row, -1 where there is none; (N,)."""
    best = (ids_NK >= 0).argmax(axis=1)
    return np.take_along_axis(ids_NK, best[:, None], axis=1)[:, 0]


def expected_rate(choices_N: Array) -> float:
    """Return how often two of the choices, drawn at random, differ; NaN for fewer than two."""
    total = len(choices_N)
    if total < 2:
        return float("nan")
    counts = np.unique(choices_N, return_counts=True)[1].astype(np.float64)
    return float(1 - (counts * (counts - 1)).sum() / (total * (total - 1)))
