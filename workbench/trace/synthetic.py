"""Made-up events in the shape of real ones: for tests of everything that reads events.

The numbers obey the laws of a real run (K distinct experts per row and layer, weights that sum to
1, one row per token and position) and mean nothing else. `run` yields a whole run; a
`SyntheticEngine` goes on for ever, for work on the screens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from engine.events import (
    STAGES,
    Decision,
    Event,
    Flights,
    RankEvent,
    RequestEvent,
    Spans,
    StartEvent,
    StepEvent,
    TextEvent,
    UnitEvent,
    no_formats,
)

DOMAINS = ("en", "de", "fr", "code", "math")
_WORDS = "the router sends each token to two of eight experts and adds what comes back ".split()
_STAGE_MS = (
    *(0.1, 0.0, 0.0, 0.2, 2.4, 0.5, 0.08, 0.05, 0.1),
    *(0.04, 0.0, 0.0, 0.0, 3.1, 0.6, 0.7, 0.3, 0.2),
)


def start_event(*, layers: int = 4, experts: int = 8, top_k: int = 2) -> StartEvent:
    """Return the start of an engine with `layers` MoE layers on two devices."""
    return StartEvent(
        model="synthetic",
        num_layers=layers,
        moe_layers=tuple(range(layers)),
        num_experts=experts,
        top_k=top_k,
        num_devices=2,
        rank_of_phy=tuple(e * 2 // experts for e in range(experts)),
        table_version=1,
        deterministic=False,
        dtype="float32",
        time_s=1_700_000_000.0,
    )


def step_event(
    start: StartEvent,
    step: int,
    rows: int,
    *,
    seed: int = 0,
    num_decisions: int = 0,
    num_ranks: int = 0,
) -> StepEvent:
    """Return one step of `rows` rows; the same arguments give the same event."""
    rng = np.random.default_rng((seed, step))
    layers, experts, top_k = len(start.moe_layers), start.num_experts, start.top_k
    order_TLE = rng.random((rows, layers, experts)).argsort(-1)
    topk_ids_TLK = order_TLE[..., :top_k].astype(np.int16)
    weights_TLK = rng.random((rows, layers, top_k)).astype(np.float32)
    weights_TLK /= np.maximum(weights_TLK.sum(-1, keepdims=True), 1e-6)
    token_ids = rng.integers(0, 4096, rows).astype(np.int32)
    return StepEvent(
        step=step,
        time_s=start.time_s + step * 0.002,
        duration_ms=1.5 + float(rng.random()) * 0.1,
        table_version=1,
        num_running=rows,
        num_waiting=0,
        num_prefill_rows=0,
        request_ids=np.arange(rows, dtype=np.int64),
        positions=np.full(rows, step, np.int32),
        token_ids=token_ids,
        homes=(np.arange(rows) % start.num_devices).astype(np.int16),
        causes=np.zeros(rows, np.uint8),
        drafted=(np.arange(rows) % 3 == 2).astype(np.uint8) if rows > 2 else None,
        topk_ids=topk_ids_TLK,
        phy_ids=topk_ids_TLK.copy(),
        topk_weights=weights_TLK,
        margins=rng.random((rows, layers)).astype(np.float32),
        stage_ms={stage: float(rng.random()) * 0.1 for stage in STAGES},
        bad_rows=0,
        decisions=tuple(
            decision(start, request_id=i, position=step, token_id=int(token_ids[i]), rng=rng)
            for i in range(min(num_decisions, rows))
        ),
        ranks=tuple(rank_event(start, rank, rng=rng) for rank in range(num_ranks)),
        spans=spans(rng, 5),
        formats=rng.integers(0, 6, topk_ids_TLK.shape).astype(np.uint8) * 16
        if rows
        else no_formats(),
        units=tuple(units_of(layer, rows, rng) for layer in range(layers)) if rows else (),
        look_ups_found=int(rng.integers(1, 5)) if rows else 0,
        look_ups_missed=int(rng.integers(0, 5)) if rows else 0,
    )


def units_of(layer: int, rows: int, rng: np.random.Generator) -> UnitEvent:
    """Return what one layer's number formats were."""
    units = int(rng.integers(1, 9))
    return UnitEvent(
        layer=layer,
        units=units,
        int8_units=units // 2,
        failed_units=units // 4,
        rows=rows,
        int8_rows=rows // 2,
        rerun_rows=rows // 4,
        sampled_rows=1,
        switches=units - 1,
        worst_error=float(np.float32(rng.random())),
    )


def rank_event(start: StartEvent, rank: int, *, rng: np.random.Generator) -> RankEvent:
    """Return what one rank did in a step, as exchanged by `overlapped`."""
    away_D = np.arange(start.num_devices) != rank
    rows_D = rng.integers(0, 9, start.num_devices)
    layers = len(start.moe_layers)
    return RankEvent(
        rank=rank,
        mode="overlapped",
        rows=rows_D,
        num_bytes=rows_D * 512 * away_D,
        messages=6 * len(start.moe_layers) * away_D,
        wait_ms=float(rng.random()),
        transfer_ms=float(rng.random()),
        busy_ms=1.0 + float(rng.random()),
        stage_ms={stage: float(rng.random()) * 0.1 for stage in STAGES},
        spans=spans(rng, 9),
        flights=Flights(
            layers=np.repeat(np.arange(layers), 4).astype(np.int16),
            parts=np.tile([0, 1], 2 * layers).astype(np.int16),
            results=np.tile([0, 0, 1, 1], layers).astype(np.uint8),
            sent_ms=np.arange(4 * layers, dtype=np.float32) * 0.01,
            arrived_ms=np.arange(4 * layers, dtype=np.float32) * 0.01 + 0.005,
            rows=rng.integers(0, 9, (4 * layers, start.num_devices)).astype(np.int32),
        ),
    )


def spans(rng: np.random.Generator, count: int) -> Spans:
    """Return stretches of time in stages, one after another."""
    ms = rng.random(count).astype(np.float32) * 0.1
    stages = rng.integers(0, len(STAGES), count).astype(np.uint8)
    return Spans(stages, (np.cumsum(ms) - ms).astype(np.float32), ms)


def decision(
    start: StartEvent,
    *,
    request_id: int,
    position: int,
    token_id: int,
    rng: np.random.Generator,
) -> Decision:
    """Return a full decision record for one token in the first MoE layer."""
    logits_E = rng.normal(size=start.num_experts).astype(np.float32)
    order_E = np.argsort(-logits_E, kind="stable")
    chosen_K = order_E[: start.top_k].astype(np.int16)
    weights_K = np.exp(logits_E[chosen_K])
    has_runner_up = start.top_k < start.num_experts
    runner_up = int(order_E[start.top_k]) if has_runner_up else -1
    last = float(logits_E[chosen_K[-1]])
    return Decision(
        request_id=request_id,
        position=position,
        token_id=token_id,
        layer=start.moe_layers[0],
        logits=logits_E,
        scores=logits_E.copy(),
        topk_ids=chosen_K,
        topk_weights=(weights_K / weights_K.sum()).astype(np.float32),
        runner_up=runner_up,
        margin=last - float(logits_E[runner_up]) if has_runner_up else float("inf"),
        physical=chosen_K.copy(),
        devices=np.asarray([start.rank_of_phy[e] for e in chosen_K], np.int16),
        reasons=("only copy",) * start.top_k,
        table_version=1,
        format=start.dtype,
        source=("engine/routing/gate.py:1", "engine/routing/device.py:1"),
        bias=rng.normal(size=start.num_experts).astype(np.float32),
        smoothing=np.zeros(start.num_experts, np.float32),
        shut=rng.integers(0, 2, start.num_experts).astype(np.uint8),
        capacity=int(rng.integers(-1, 9)),
        unit=int(rng.integers(-1, 9)),
        format_reason="the engine's own",
        verdict="accepted",
        model="draft",
        looked_up=("sort",),
        stage_ms={"select": 0.25, "sort": 0.5},
    )


def run(
    start: StartEvent, *, steps: int = 20, rows: int = 4, seed: int = 0, num_ranks: int = 0
) -> Iterator[Event]:
    """Yield a whole run: start, requests, steps with text after each, ends."""
    yield start
    for request in range(rows):
        now = start.time_s
        yield RequestEvent(request, "added", "en", now, prompt_token_ids=(1, 2, 3))
    for step in range(steps):
        event = step_event(
            start, step, rows, seed=seed, num_decisions=step % 3, num_ranks=num_ranks
        )
        yield event
        after = event.time_s + event.duration_ms / 1000
        for request in range(rows):
            yield TextEvent(request, "en", f" w{step}", step + 1, step == steps - 1, after)
    for request in range(rows):
        yield RequestEvent(request, "finished", "en", after, finish_reason="length")


class SyntheticEngine:
    """Yields the events of an engine that keeps `running` requests going.

    Every domain has a taste of its own, so that a map has something to show.
    """

    def __init__(
        self, *, layers: int = 4, experts: int = 8, top_k: int = 2, running: int = 6, seed: int = 0
    ) -> None:
        self._start = start_event(layers=layers, experts=experts, top_k=top_k)
        self._rng = np.random.default_rng(seed)
        self._taste = self._rng.dirichlet(np.full(experts, 0.6), (len(DOMAINS), layers))
        self._tokens = dict.fromkeys(range(running), 0)
        self._next_id = running
        self._step = 0

    def start(self, time_s: float | None = None) -> list[Event]:
        """Return what a real engine says first: what it is, and its first requests."""
        now = time.time() if time_s is None else time_s
        return [replace(self._start, time_s=now), *(self._added(n, now) for n in self._tokens)]

    def step(self, time_s: float | None = None) -> Iterator[Event]:
        """Yield the events of one step, one new token for every request."""
        now = time.time() if time_s is None else time_s
        request_ids = np.array(list(self._tokens), np.int64)
        # The Gumbel trick: the K largest of log p + noise are K draws without replacement.
        taste_TLE = self._taste[request_ids % len(DOMAINS)]
        scores_TLE = np.log(taste_TLE + 1e-9) + self._rng.gumbel(size=taste_TLE.shape)
        ids_TLK = np.argsort(-scores_TLE, axis=-1)[..., : self._start.top_k].astype(np.int16)
        wobble = float(self._rng.uniform(0.9, 1.2))
        self._step += 1
        yield replace(
            step_event(self._start, self._step, len(request_ids)),
            time_s=now,
            duration_ms=sum(_STAGE_MS) * wobble,
            request_ids=request_ids,
            positions=np.array(list(self._tokens.values()), np.int32),
            topk_ids=ids_TLK,
            phy_ids=ids_TLK,
            stage_ms={stage: ms * wobble for stage, ms in zip(STAGES, _STAGE_MS, strict=True)},
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
