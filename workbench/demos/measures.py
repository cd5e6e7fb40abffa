"""What can be measured while a demo runs: views over the recent past, and answers to questions.

A measure never looks at what the demo has done, only at what came of it. It returns None while
there is too little to go by.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from workbench import views
from workbench.trace.trace import Trace

ROWS = 400
"""Token rows a measure wants to see unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Readings:
    """What an operator has before them."""

    trace: Trace
    """What the engine recorded since the step was entered, the newest rows."""
    foreseen: Callable[[str], float | None]
    """Takes a domain; returns the share of its known texts' next tokens that the engine foresees
    now over that at the start. None until the answers are there."""
    watched: int | None
    """The request whose decisions are recorded in full."""


class Measure(NamedTuple):
    """A measure and how its value reads."""

    take: Callable[..., float | None]
    unit: str
    """`×`, `share` (0 to 1), what is counted, or nothing."""
    formula: str


def experts_per_token(readings: Readings, rows: int = ROWS) -> float | None:
    """Return the mean number of experts a token was sent to in a layer."""
    if readings.trace.num_rows < rows:
        return None
    return float((readings.trace.columns["rows/topk_ids"] >= 0).sum(axis=2).mean())


def rows_per_s(readings: Readings, rows: int = ROWS) -> float | None:
    """Return token rows per second."""
    trace = readings.trace
    if trace.num_rows < rows:
        return None
    began = trace.columns["steps/time_s"]
    took_s = float(began[-1] - began[0]) + float(trace.columns["steps/duration_ms"][-1]) / 1e3
    return trace.num_rows / took_s if took_s > 0 else None


def expert_load(
    readings: Readings, layer: int, expert: int, domain: str | None = None, rows: int = ROWS
) -> float | None:
    """Return the load of one expert of one layer, over all rows or those of one domain."""
    table = views.domain_load(readings.trace) if domain else views.expert_load(readings.trace)
    table = table[table["layer"] == layer]
    if domain:
        table = table[table["domain"] == domain]
    seen = int(table["rows"].sum()) / max(1, readings.trace.start.top_k)
    cell = table[table["expert"] == expert]
    if seen < rows or cell.empty:
        return None
    return _finite(float(cell["load"].iloc[0]))


def overlap(
    readings: Readings, layer: int, first: str, second: str, rows: int = 200
) -> float | None:
    """Return how much of two domains' load falls on the same experts of a layer."""
    table = views.domain_load(readings.trace)
    table = table[table["layer"] == layer]
    shares = []
    for domain in (first, second):
        own = table[table["domain"] == domain]
        if int(own["rows"].sum()) < rows * readings.trace.start.top_k:
            return None
        shares.append(own["share"].to_numpy())
    return _finite(float(np.minimum(*shares).sum()))


def domain_share(readings: Readings, domain: str, rows: int = ROWS) -> float | None:
    """Return the share of the newest rows that belong to a domain."""
    from workbench.views.rows import row_domains

    newest = row_domains(readings.trace)[-rows:]
    return float((newest == domain).mean()) if len(newest) == rows else None


def overhead_share(readings: Readings, rows: int = ROWS) -> float | None:
    """Return the share of the steps' time that goes into deciding where tokens go."""
    total = views.overhead_total(readings.trace)
    if readings.trace.num_rows < rows or total.empty:
        return None
    return _finite(float(total["share"].iloc[0]))


def watched_tokens(readings: Readings) -> float | None:
    """Return how many tokens of the watched text have their whole decisions recorded."""
    if readings.watched is None:
        return None
    decisions = readings.trace.decisions
    return float(len({d.position for d in decisions if d.request_id == readings.watched}))


def weights_sum(readings: Readings, layer: int) -> float | None:
    """Return the sum of the watched tokens' expert weights in a layer, the one furthest from 1."""
    sums = [
        float(np.sum(decision.topk_weights))
        for decision in readings.trace.decisions
        if decision.request_id == readings.watched and decision.layer == layer
    ]
    return max(sums, key=lambda value: abs(value - 1)) if sums else None


def quality_kept(readings: Readings, domain: str) -> float | None:
    """Return how well the engine foresees known texts of a domain, over the same at the start."""
    return readings.foreseen(domain)


MEASURES: dict[str, Measure] = {
    "experts_per_token": Measure(experts_per_token, "experts", "experts sent to / (rows x layers)"),
    "rows_per_s": Measure(rows_per_s, "rows/s", "token rows / seconds"),
    "expert_load": Measure(
        expert_load, "×", "slots of the expert / (slots of its layer / number of experts)"
    ),
    "overlap": Measure(overlap, "share", "sum over experts of the smaller of both domains' shares"),
    "domain_share": Measure(domain_share, "share", "rows of the domain / newest rows"),
    "overhead_share": Measure(
        overhead_share, "share", "(plan + select + place + sort + format) / step, over all steps"
    ),
    "watched_tokens": Measure(watched_tokens, "tokens", "tokens whose decisions are recorded"),
    "weights_sum": Measure(weights_sum, "", "sum of a token's weights, furthest from 1"),
    "quality_kept": Measure(
        quality_kept, "share", "held-out next tokens foreseen now / the same at the start"
    ),
}
"""By name, as playlists call them."""


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
