"""What the page *Step* shows: the requests of the recent past, and one of them token by token."""

from __future__ import annotations

import threading
from collections import OrderedDict
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
MAX_KEPT = 16
"""Requests recorded in full that stay to be read when the engine has forgotten them."""
KEPT = "kept"
"""How a request ended of which that is so."""


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


class Shelf:
    """What pages have read of requests recorded in full, for a reload or the next reader.

    The engine's recent past is some seconds long; a reader takes longer over one token. Pages of
    one dashboard share a shelf, from any thread.
    """

    def __init__(self) -> None:
        self._states: OrderedDict[int, State] = OrderedDict()
        self._lock = threading.Lock()

    def complete(self, request_id: int, read: State | None) -> State | None:
        """Return what was read of a request together with what is kept of it, and keep that."""
        with self._lock:
            held = self._states.get(request_id)
            if read is None:
                return held
            state = read if held is None else grown(held, read)
            if _full(state):
                self._states[request_id] = state
                self._states.move_to_end(request_id)
                if len(self._states) > MAX_KEPT:
                    self._states.popitem(last=False)
            return state

    def besides(self, requests: tuple[Listed, ...]) -> tuple[Listed, ...]:
        """Return the kept requests that are not among these, newest first.

        Numbers only rise while an engine runs: those above the newest are from before its start.
        """
        newest = max((request.id for request in requests), default=None)
        with self._lock:
            if newest is not None:
                for old in [n for n in self._states if n > newest]:
                    del self._states[old]
            known = {request.id for request in requests}
            others = sorted(self._states.keys() - known, reverse=True)
            return tuple(_kept(self._states[n]) for n in others)


def recent(
    trace: Trace, wanted: int | None, tokenizer: Tokenizer | None, shelf: Shelf | None = None
) -> Recent:
    """Return the newest requests, and `wanted` or the newest recorded in full."""
    shelf = shelf or Shelf()
    listed = _listed(trace)
    requests = (*listed, *shelf.besides(listed))
    if wanted is None:
        wanted = next((request.id for request in requests if request.full), None)
    if wanted is None:
        return Recent(requests, None, None)
    known = wanted in {request.id for request in listed}
    read = stepper_state(trace, wanted, tokenizer=tokenizer) if known else None
    return Recent(requests, wanted, shelf.complete(wanted, read))


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


def _kept(state: State) -> Listed:
    """Return the line of a request that only a shelf still has."""
    request = state["request"]
    return Listed(request["id"], request["label"], len(state["tokens"]), _full(state), KEPT)


def _full(state: State) -> int:
    """Return how many tokens were recorded in full."""
    return sum(any(layer["full"] for layer in token["layers"]) for token in state["tokens"])


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
