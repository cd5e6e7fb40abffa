"""A trace as a Chrome timeline (JSON), which Perfetto and chrome://tracing open.

Each rank is a process with its number as `pid`; one process alone is rank 0. Of its threads, the
streams, 1 computes: a slice for the step, in it one for each layer, in it the stages as they ran,
through all layers. 2 and 3 are the two buffers of the exchange: what is under way from dispatch to
arrival. Arrows tie each sending to where it arrives. One process more shows the controller's part
of each step and counts rows and waiting requests, another the lives of the requests.

A trace without spans (of an older version) shows each stage as its sum over all layers, one after
the other in the order a token meets them; those slices say so.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from engine.events import STAGES, RankEvent, RequestEvent, Spans, StepEvent
from workbench.trace.trace import Trace

ENGINE, REQUESTS = 10_000, 10_001
"""Process ids of what belongs to no rank."""
COMPUTE, BUFFERS = 1, (2, 3)
"""Thread ids: the stream that computes, and the buffers of the exchange."""
FIRST, LAST = "attention", "head"
"""The stages with which a layer begins, and with which what follows the layers does."""

Slice = dict[str, Any]


def timeline(trace: Trace) -> dict[str, Any]:
    """Return the trace in the Trace Event Format's object form; times in microseconds from 0.

    Source: Trace Event Format, phases X (slice), b and e (nestable async), s and f (flow),
    C (counter), M (name).
    """
    columns = trace.columns
    origin = float(columns["steps/time_s"][0]) if trace.num_steps else trace.start.time_s
    events = list(_names(trace))
    for index in range(trace.num_steps):
        step = trace.step_event(index)
        began = (step.time_s - origin) * 1e6
        events += _step(step, began)
        if step.ranks:
            events += _stages(step.spans, ENGINE, began, until=step.duration_ms)
            for rank in step.ranks:
                events += _rank(rank, step.step, began)
            events += _flows(step, began)
        elif len(step.spans.stages):
            events += _compute(step.spans, 0, step.step, began)
        else:
            events += _sums(step, began)
    for request in trace.requests:
        if request.kind != "preempted":
            events.append(_request(request, origin))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _step(step: StepEvent, began: float) -> list[Slice]:
    lane = {"pid": ENGINE, "tid": COMPUTE}
    return [
        {
            "ph": "X",
            "name": "step",
            "ts": began,
            "dur": step.duration_ms * 1e3,
            "args": {
                "step": step.step,
                "rows": step.num_rows,
                "prefill_rows": step.num_prefill_rows,
                "table_version": step.table_version,
            },
            **lane,
        },
        {"ph": "C", "name": "rows", "ts": began, "args": {"rows": step.num_rows}, **lane},
        {"ph": "C", "name": "waiting", "ts": began, "args": {"requests": step.num_waiting}, **lane},
    ]


def _sums(step: StepEvent, began: float) -> Iterator[Slice]:
    """Draw the stages one after the other, where only their sums are known."""
    at = began
    label = {"measured": "sum over all layers, drawn in stage order"}
    for stage in STAGES:
        if stage in step.stage_ms:
            long = step.stage_ms[stage] * 1e3
            yield _slice(stage, ENGINE, COMPUTE, at, long, label)
            at += long


def _rank(rank: RankEvent, number: int, began: float) -> Iterator[Slice]:
    """Draw one rank's part of a step: what it computed and what it had under way."""
    yield from _compute(rank.spans, rank.rank, number, began)
    for flight in _flights(rank, began):
        yield _slice(
            flight["what"],
            rank.rank,
            flight["tid"],
            flight["sent"],
            flight["arrived"] - flight["sent"],
            {"layer": flight["layer"], "part": flight["part"], "rows": flight["rows"]},
        )


def _compute(spans: Spans, pid: int, number: int, began: float) -> Iterator[Slice]:
    """Draw a step, its layers and its stages, one within the other."""
    stages = list(_stages(spans, pid, began))
    if not stages:
        return
    ends = [stage["ts"] + stage["dur"] for stage in stages]
    start = stages[0]["ts"]
    yield _slice("step", pid, COMPUTE, start, max(ends) - start, {"step": number})
    firsts = [place for place, stage in enumerate(stages) if stage["name"] == FIRST]
    for layer, first in enumerate(firsts):
        last = first
        while last + 1 < len(stages) and stages[last + 1]["name"] not in (FIRST, LAST):
            last += 1
        at = stages[first]["ts"]
        yield _slice(f"layer {layer}", pid, COMPUTE, at, ends[last] - at, {"step": number})
    yield from stages


def _stages(spans: Spans, pid: int, began: float, *, until: float = math.inf) -> Iterator[Slice]:
    """Draw stages; each ends where the next begins, whatever single precision made of it."""
    begin_ms = spans.begin_ms.astype(float)
    latest = np.minimum(begin_ms + spans.ms, until)
    latest[:-1] = np.minimum(latest[:-1], begin_ms[1:])
    ms = np.maximum(latest - begin_ms, 0.0)
    for index, at, long in zip(spans.stages, begin_ms * 1e3, ms * 1e3, strict=True):
        yield _slice(STAGES[index], pid, COMPUTE, began + float(at), float(long), {})


def _flights(rank: RankEvent, began: float) -> list[dict[str, Any]]:
    """Return what a rank had under way, where it is drawn; one after another in each buffer."""
    flights = rank.flights
    free: dict[int, float] = defaultdict(float)
    found = []
    for place in range(len(flights.layers)):
        part, results = int(flights.parts[place]), bool(flights.results[place])
        tid = BUFFERS[part % len(BUFFERS)]
        sent = max(began + float(flights.sent_ms[place]) * 1e3, free[tid])
        arrived = max(began + float(flights.arrived_ms[place]) * 1e3, sent)
        free[tid] = arrived
        found.append(
            {
                "what": "results" if results else "rows",
                "layer": int(flights.layers[place]),
                "part": part,
                "rows": flights.rows[place].tolist(),
                "tid": tid,
                "sent": sent,
                "arrived": arrived,
            }
        )
    return found


def _flows(step: StepEvent, began: float) -> Iterator[Slice]:
    """Tie each sending of rows to the arrival on the rank they went to."""
    under_way = {rank.rank: _flights(rank, began) for rank in step.ranks}
    for source, flights in under_way.items():
        for place, flight in enumerate(flights):
            for target, rows in enumerate(flight["rows"]):
                if not rows or target == source or target not in under_way:
                    continue
                arrival = under_way[target][place]
                ends = {
                    "cat": flight["what"],
                    "name": f"{flight['what']} of layer {flight['layer']}",
                    "id": f"{step.step}.{place}.{source}.{target}",
                }
                yield {"ph": "s", "pid": source, "tid": flight["tid"], "ts": flight["sent"], **ends}
                yield {
                    "ph": "f",
                    "bp": "e",  # to the slice that encloses it
                    "pid": target,
                    "tid": arrival["tid"],
                    "ts": arrival["arrived"],
                    **ends,
                }


def _request(request: RequestEvent, origin: float) -> Slice:
    return {
        "ph": "b" if request.kind == "added" else "e",
        "cat": "request",
        "name": f"request {request.request_id} {request.label}".rstrip(),
        "id": request.request_id,
        "pid": REQUESTS,
        "tid": 1,
        "ts": (request.time_s - origin) * 1e6,
        "args": {"prompt_tokens": len(request.prompt_token_ids), "end": request.finish_reason},
    }


def _slice(name: str, pid: int, tid: int, at: float, long: float, args: dict[str, Any]) -> Slice:
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": at, "dur": long, "args": args}


def _names(trace: Trace) -> Iterator[Slice]:
    """Name the processes and threads that the trace has."""
    yield _name("process", ENGINE, 0, f"controller: {trace.start.model}")
    yield _name("process", REQUESTS, 0, "requests")
    ranks = sorted(set(trace.columns["ranks/rank"].tolist()))
    for rank in ranks or ([0] if len(trace.columns["spans/rank"]) else []):
        yield _name("process", rank, 0, f"rank {rank}")
        yield _name("thread", rank, COMPUTE, "compute")
        for number, tid in enumerate(BUFFERS if ranks else ()):
            yield _name("thread", rank, tid, f"exchange, buffer {number}")


def _name(what: str, pid: int, tid: int, name: str) -> Slice:
    return {"ph": "M", "name": f"{what}_name", "pid": pid, "tid": tid, "args": {"name": name}}
