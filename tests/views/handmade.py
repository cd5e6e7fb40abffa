"""Traces written out row by row, so that a test's numbers can be checked by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from engine.events import CAUSES, ControlEvent, RequestEvent, StartEvent, StepEvent
from workbench.trace import Trace


@dataclass(frozen=True)
class Row:
    """One token in one step; `ids` by layer, each K experts."""

    request: int
    position: int
    ids: Sequence[Sequence[int]]
    step: int = 0
    cause: str = "accepted"
    home: int = 0
    phy: Sequence[Sequence[int]] | None = None
    token: int = 7


def start(
    *,
    experts: int = 4,
    top_k: int = 2,
    layers: tuple[int, ...] = (0,),
    devices: int = 2,
    rank_of_phy: tuple[int, ...] = (0, 0, 1, 1),
    dtype: str = "float32",
) -> StartEvent:
    return StartEvent(
        model="by hand",
        num_layers=max(layers, default=0) + 1,
        moe_layers=layers,
        num_experts=experts,
        top_k=top_k,
        num_devices=devices,
        rank_of_phy=rank_of_phy,
        table_version=1,
        deterministic=True,
        dtype=dtype,
        time_s=100.0,
    )


def step(
    begin: StartEvent,
    number: int,
    rows: Sequence[Row],
    *,
    version: int = 1,
    duration_ms: float = 10.0,
    stage_ms: Mapping[str, float] | None = None,
    prefill: int = 0,
) -> StepEvent:
    shape = (len(rows), len(begin.moe_layers), begin.top_k)
    ids = np.array([row.ids for row in rows], np.int16).reshape(shape)
    phy = np.array([row.phy or row.ids for row in rows], np.int16).reshape(shape)
    return StepEvent(
        step=number,
        time_s=100.0 + number,
        duration_ms=duration_ms,
        table_version=version,
        num_running=len({row.request for row in rows}),
        num_waiting=0,
        num_prefill_rows=prefill,
        request_ids=np.array([row.request for row in rows], np.int64),
        positions=np.array([row.position for row in rows], np.int32),
        token_ids=np.array([row.token for row in rows], np.int32),
        homes=np.array([row.home for row in rows], np.int16),
        causes=np.array([CAUSES.index(row.cause) for row in rows], np.uint8),
        topk_ids=ids,
        phy_ids=phy,
        topk_weights=np.where(ids >= 0, 1 / max(1, begin.top_k), 0).astype(np.float32),
        margins=np.full(shape[:2], 0.5, np.float32),
        stage_ms=dict(stage_ms or {}),
        bad_rows=0,
    )


def trace(
    rows: Sequence[Row],
    *,
    begin: StartEvent | None = None,
    versions: Mapping[int, int] | None = None,
    labels: Mapping[int, str] | None = None,
    published: Mapping[int, Sequence[int]] | None = None,
) -> Trace:
    """Return the trace of `rows`, one step event for each step number among them."""
    begin = begin or start()
    numbers = sorted({row.step for row in rows})
    steps = [
        step(
            begin,
            number,
            [row for row in rows if row.step == number],
            version=(versions or {}).get(number, 1),
        )
        for number in numbers
    ]
    notes: list[RequestEvent | ControlEvent] = [
        RequestEvent(request, "added", label, 100.0) for request, label in (labels or {}).items()
    ]
    notes += [
        ControlEvent("publish_table", {"rank_of_phy": list(ranks)}, version, 100.0)
        for version, ranks in (published or {}).items()
    ]
    return from_steps(steps, begin=begin, notes=notes)


def from_steps(
    steps: Sequence[StepEvent],
    *,
    begin: StartEvent | None = None,
    notes: Sequence[RequestEvent | ControlEvent] = (),
) -> Trace:
    first = len(notes)
    return Trace.from_events(
        begin or start(),
        [(first + at, event) for at, event in enumerate(steps)],
        list(enumerate(notes)),
    )


EMPTY = trace([])
DENSE_START = start(experts=0, top_k=0, layers=(), devices=1, rank_of_phy=())
DENSE = trace([Row(0, 0, ()), Row(0, 1, ())], begin=DENSE_START)
"""A model without MoE layers: rows have no experts."""
ONE_TOKEN = trace([Row(0, 0, [(2, 1)])], labels={0: "de"})
