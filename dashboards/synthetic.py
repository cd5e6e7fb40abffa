"""An invented engine: the events of one, without a model, for work on the screens and for tests.

Its routing is drawn at random, with a different taste for every domain, so that the map has
something to show. Nothing here is a measurement; its model is called `synthetic`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from engine.events import STAGES, Event, RequestEvent, StartEvent, StepEvent, TextEvent

DOMAINS = ("en", "de", "fr", "code", "math")
_WORDS = "the router sends each token to two of eight experts and adds what comes back ".split()
_STAGE_MS = (0.1, 0.2, 2.4, 0.5, 0.08, 0.05, 0.14, 3.1, 0.6, 0.7, 0.3, 0.2)


class SyntheticEngine:
    """Yields the events of an engine that keeps `running` requests going."""

    def __init__(
        self, *, layers: int = 4, experts: int = 8, top_k: int = 2, running: int = 6, seed: int = 0
    ) -> None:
        self.shape = (layers, experts, top_k)
        self._rng = np.random.default_rng(seed)
        self._taste = self._rng.dirichlet(np.full(experts, 0.6), (len(DOMAINS), layers))
        self._tokens = {request_id: 0 for request_id in range(running)}
        self._next_id = running
        self._step = 0

    def start(self, time_s: float | None = None) -> list[Event]:
        """Return what a real engine says first: what it is, and its first requests."""
        now = time.time() if time_s is None else time_s
        layers, experts, top_k = self.shape
        first = StartEvent(
            model="synthetic",
            num_layers=layers,
            moe_layers=tuple(range(layers)),
            num_experts=experts,
            top_k=top_k,
            num_devices=2,
            rank_of_phy=tuple(expert * 2 // experts for expert in range(experts)),
            table_version=1,
            deterministic=False,
            dtype="float32",
            time_s=now,
        )
        return [first, *(self._added(request_id, now) for request_id in self._tokens)]

    def step(self, time_s: float | None = None) -> Iterator[Event]:
        """Yield the events of one step, one new token for every request."""
        now = time.time() if time_s is None else time_s
        layers, experts, top_k = self.shape
        request_ids = np.array(list(self._tokens), np.int64)
        # The Gumbel trick: the K largest of log p + noise are K draws without replacement.
        taste = self._taste[request_ids % len(DOMAINS)]
        scores = np.log(taste + 1e-9) + self._rng.gumbel(size=taste.shape)
        ids = np.argsort(-scores, axis=-1)[..., :top_k].astype(np.int16)
        wobble = float(self._rng.uniform(0.9, 1.2))
        stage_ms = dict(zip(STAGES, (ms * wobble for ms in _STAGE_MS), strict=True))
        self._step += 1
        rows = len(request_ids)
        yield StepEvent(
            step=self._step,
            time_s=now,
            duration_ms=sum(stage_ms.values()),
            table_version=1,
            num_running=rows,
            num_waiting=0,
            num_prefill_rows=0,
            request_ids=request_ids,
            positions=np.array(list(self._tokens.values()), np.int32),
            token_ids=np.zeros(rows, np.int32),
            homes=np.zeros(rows, np.int16),
            causes=np.zeros(rows, np.uint8),
            topk_ids=ids,
            phy_ids=ids,
            topk_weights=np.full((rows, layers, top_k), 1.0 / top_k, np.float32),
            margins=np.zeros((rows, layers), np.float32),
            stage_ms=stage_ms,
            bad_rows=0,
        )
        for request_id in list(self._tokens):
            yield from self._token(request_id, now)

    def _token(self, request_id: int, now: float) -> Iterator[Event]:
        self._tokens[request_id] += 1
        count, label = self._tokens[request_id], DOMAINS[request_id % len(DOMAINS)]
        finished = count >= 40 + 7 * (request_id % 5)
        word = _WORDS[(count + request_id) % len(_WORDS)] + " "
        yield TextEvent(request_id, label, word, count, finished, now)
        if finished:
            del self._tokens[request_id]
            yield RequestEvent(request_id, "finished", label, now, finish_reason="length")
            self._tokens[self._next_id] = 0
            yield self._added(self._next_id, now)
            self._next_id += 1

    def _added(self, request_id: int, now: float) -> Event:
        label = DOMAINS[request_id % len(DOMAINS)]
        return RequestEvent(request_id, "added", label, now, prompt_token_ids=(1, 2, 3))
