"""What the page *Step* shows: the requests of the recent past, and one of them token by token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.model.tokenizer import Tokenizer
from workbench.trace import Trace
from workbench.widgets import State, stepper_state

LISTED = 64
"""Newest requests that are looked at."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One request of the recent past."""

    id: int
    label: str
    tokens: int
    """Tokens whose rows are in the recent past."""
    full: int
    """Those of them whose whole decision was recorded."""
    ended: str
    """Why it ended, empty while it runs."""


@dataclass(frozen=True, slots=True)
class Recent:
    """The requests, newest first, and the one asked for as the stepper reads it."""

    requests: tuple[Listed, ...]
    wanted: int | None
    state: State | None
    """None when the request is not, or no longer, in the recent past."""


def recent(trace: Trace, wanted: int | None, tokenizer: Tokenizer | None) -> Recent:
    """Return the newest requests, and `wanted` or the newest recorded in full."""
    requests = _listed(trace)
    if wanted is None:
        wanted = next((request.id for request in requests if request.full), None)
    known = {request.id for request in requests}
    state = stepper_state(trace, wanted, tokenizer=tokenizer) if wanted in known else None
    return Recent(requests, wanted, state)


def _listed(trace: Trace) -> tuple[Listed, ...]:
    pairs = np.stack([trace.columns["rows/request_ids"], trace.columns["rows/positions"]], axis=1)
    ids, tokens = np.unique(np.unique(pairs, axis=0)[:, 0], return_counts=True)
    full: dict[int, set[int]] = {}
    for decision in trace.decisions:
        full.setdefault(decision.request_id, set()).add(decision.position)
    labels: dict[int, str] = {}
    ended: dict[int, str] = {}
    for event in trace.requests:
        labels[event.request_id] = event.label
        if event.kind in ("finished", "aborted"):
            ended[event.request_id] = event.finish_reason or event.kind
    newest = list(zip(ids.tolist(), tokens.tolist(), strict=True))[::-1][:LISTED]
    return tuple(
        Listed(n, labels.get(n, ""), count, len(full.get(n, ())), ended.get(n, ""))
        for n, count in newest
    )
