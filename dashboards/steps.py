"""What the page *Step* shows: the requests of the recent past, and one of them token by token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.events import CAUSES
from engine.model.tokenizer import Tokenizer
from workbench.trace import Trace
from workbench.widgets import State, stepper_state
from workbench.widgets.steps import MAX_TOKENS

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


def grown(held: State, read: State) -> State:
    """Return one request as it was held together with what was read of it later.

    The recent past forgets a request from its beginning, and with it its label and where its prompt
    ended. What is held stays, so its first position is never later than before; of a token that is
    in both the better record counts: of an accepted row, recorded in full.

    Another request under the same number, after a new start of the engine, is returned as read.
    """
    before = {token["position"]: token for token in held["tokens"]}
    later = {token["position"]: token for token in read["tokens"]}
    both = before.keys() & later.keys()
    if held["engine"] != read["engine"] or any(before[n]["id"] != later[n]["id"] for n in both):
        return read
    generates = bool(held["tokens"]) and held["tokens"][-1]["generated"]
    for n in later.keys() - both:
        if later[n]["generated"] is None and generates and n > held["tokens"][-1]["position"]:
            later[n] = {**later[n], "generated": True}
    tokens = {**before, **later, **{n: _better(before[n], later[n]) for n in both}}
    request = {name: read["request"][name] or held["request"][name] for name in read["request"]}
    cut = len(tokens) > MAX_TOKENS or held["note"] or read["note"]
    return {
        **read,
        "request": {**request, "id": read["request"]["id"]},
        "note": f"the first {MAX_TOKENS} tokens" if cut else "",
        "tokens": [tokens[n] for n in sorted(tokens)][:MAX_TOKENS],
    }


def _better(held: dict[str, Any], read: dict[str, Any]) -> dict[str, Any]:
    """Return the token as held unless a better row of it was read; how often it ran, at least."""

    def worth(token: dict[str, Any]) -> tuple[bool, int]:
        full = sum(layer["full"] is not None for layer in token["layers"])
        return token["cause"] == CAUSES[0], full

    better = read if worth(read) > worth(held) else held
    return {**better, "runs": max(held["runs"], read["runs"])}


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
