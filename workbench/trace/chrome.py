"""A trace as a Chrome timeline (JSON), which Perfetto and chrome://tracing open.

One track shows the steps and, inside each, its stages; one track per request shows its life; two
counters show rows per step and waiting requests. A step reports its stages as sums over all layers,
so they are drawn one after the other in the order a token meets them, not as they interleaved; the
slices say so.
"""

from __future__ import annotations

from typing import Any

from engine.events import STAGES, RequestEvent
from workbench.trace.trace import Trace

ENGINE, REQUESTS = 1, 2
"""Process ids of the two groups of tracks."""


def timeline(trace: Trace) -> dict[str, Any]:
    """Return the trace in the Trace Event Format's object form; times in microseconds from 0.

    Source: Trace Event Format, phases X (slice), b and e (nestable async), C (counter), M (name).
    """
    columns = trace.columns
    origin = float(columns["steps/time_s"][0]) if trace.num_steps else trace.start.time_s
    events = [_name(ENGINE, f"engine: {trace.start.model}"), _name(REQUESTS, "requests")]
    for index in range(trace.num_steps):
        events += _step(trace, index, origin)
    for request in trace.requests:
        if request.kind != "preempted":
            events.append(_request(request, origin))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _step(trace: Trace, index: int, origin: float) -> list[dict[str, Any]]:
    columns = trace.columns
    began = (float(columns["steps/time_s"][index]) - origin) * 1e6
    rows = int(columns["steps/row_start"][index + 1] - columns["steps/row_start"][index])
    waiting = int(columns["steps/num_waiting"][index])
    lane = {"pid": ENGINE, "tid": 1}
    events = [
        {
            "ph": "X",
            "name": "step",
            "ts": began,
            "dur": float(columns["steps/duration_ms"][index]) * 1e3,
            "args": {
                "step": int(columns["steps/step"][index]),
                "rows": rows,
                "prefill_rows": int(columns["steps/num_prefill_rows"][index]),
                "table_version": int(columns["steps/table_version"][index]),
            },
            **lane,
        },
        {"ph": "C", "name": "rows", "ts": began, "args": {"rows": rows}, **lane},
        {"ph": "C", "name": "waiting", "ts": began, "args": {"requests": waiting}, **lane},
    ]
    at = began
    for stage, ms in zip(STAGES, columns["steps/stage_ms"][index].tolist(), strict=True):
        if ms == ms:
            label = {"measured": "sum over all layers, drawn in stage order"}
            events.append(
                {"ph": "X", "name": stage, "ts": at, "dur": ms * 1e3, "args": label, **lane}
            )
            at += ms * 1e3
    return events


def _request(request: RequestEvent, origin: float) -> dict[str, Any]:
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


def _name(pid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
