"""A trace in memory: numpy columns, decisions, and what happened around the steps.

Built by the recorder (`Trace.from_events`) and by `workbench.trace.store.load`; read by views,
`replay` and the command line. A trace is never changed after it is built.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self, TypeVar

import numpy as np

from engine.config import EXCHANGES
from engine.errors import TraceError
from engine.events import (
    STAGES,
    ControlEvent,
    Decision,
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
from workbench.trace.schema import COLUMNS, ENGINE, Array, check, sizes

Note = RequestEvent | TextEvent | ControlEvent
N = TypeVar("N", RequestEvent, TextEvent, ControlEvent)


@dataclass(frozen=True, slots=True)
class Dropped:
    """What a recorder let go of to stay within its memory."""

    steps: int = 0
    rows: int = 0
    notes: int = 0
    """Request, text and control events."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Everything one engine said between two moments."""

    start: StartEvent
    columns: dict[str, Array]
    """By name, as `workbench.trace.schema.COLUMNS` lists them."""
    decisions: tuple[Decision, ...]
    """In the order of the `decisions/…` columns."""
    notes: tuple[tuple[int, Note], ...]
    """Request, text and control events, each with its place in the order of all events."""
    dropped: Dropped = Dropped()

    def __post_init__(self) -> None:
        check(self.start, self.columns)
        for column in self.columns.values():
            column.setflags(write=False)
        if len(self.decisions) != len(self.columns["decisions/layer"]):
            raise TraceError(
                f"the trace has {len(self.columns['decisions/layer'])} decision lines "
                f"but {len(self.decisions)} decision texts."
            )

    @classmethod
    def from_events(
        cls,
        start: StartEvent,
        steps: Sequence[tuple[int, StepEvent]],
        notes: Iterable[tuple[int, Note]] = (),
        dropped: Dropped = Dropped(),
    ) -> Self:
        """Put events, each with its place in the order of all events, into columns.

        Raises:
            TraceError: an event does not fit `start` (a shape, an expert id >= E).
        """
        decisions = tuple(d for _, event in steps for d in event.decisions)
        return cls(start, _columns(start, steps, decisions), decisions, tuple(notes), dropped)

    @property
    def num_steps(self) -> int:
        """Forward passes in the trace (S)."""
        return len(self.columns["steps/step"])

    @property
    def num_rows(self) -> int:
        """Token rows in the trace (N)."""
        return len(self.columns["rows/token_ids"])

    @property
    def num_rank_lines(self) -> int:
        """Lines of the `ranks/…` columns, one per step and rank (Q)."""
        return len(self.columns["ranks/rank"])

    @property
    def requests(self) -> tuple[RequestEvent, ...]:
        """Requests added, finished, aborted and preempted, in order."""
        return self._of(RequestEvent)

    @property
    def texts(self) -> tuple[TextEvent, ...]:
        """Pieces of generated text, in order."""
        return self._of(TextEvent)

    @property
    def controls(self) -> tuple[ControlEvent, ...]:
        """What operators and drills did, in order."""
        return self._of(ControlEvent)

    @property
    def row_steps(self) -> Array:
        """(N,) the index of the step each row belongs to."""
        per_step = np.diff(self.columns["steps/row_start"])
        return np.repeat(np.arange(self.num_steps), per_step)

    def rows_of(self, request_id: int) -> Array:
        """Return the indices of one request's rows, in the order they ran."""
        return np.flatnonzero(self.columns["rows/request_ids"] == request_id)

    def expert_counts(self) -> Array:
        """Return (L, E) how many (row, slot) pairs chose each expert; -1 is not counted."""
        return count_ids(self.columns["rows/topk_ids"], self.start.num_experts)

    def step_event(self, index: int) -> StepEvent:
        """Return step `index` as the event a live sink saw; arrays are views into the trace."""
        first, last = self.columns["steps/row_start"][index : index + 2]
        rows: dict[str, Any] = {
            name: self.columns[f"rows/{name}"][first:last] for name in _names("rows")
        }
        numbers: dict[str, Any] = {
            name: self.columns[f"steps/{name}"][index].item() for name in _STEP_NUMBERS
        }
        own = np.searchsorted(self.columns["decisions/step_index"], [index, index + 1])
        lines = np.searchsorted(self.columns["ranks/step_index"], [index, index + 1])
        units = self._units(index)
        if not units:
            rows["formats"] = no_formats()
        if not rows["drafted"].any():
            rows["drafted"] = None
        return StepEvent(
            **numbers,
            **rows,
            stage_ms=_reported(self.columns["steps/stage_ms"][index]),
            decisions=self.decisions[own[0] : own[1]],
            dropped=_dropped(rows["topk_ids"], rows["phy_ids"]),
            ranks=tuple(self._rank_event(index, line) for line in range(*lines.tolist())),
            spans=Spans(**self._part("spans", index, ENGINE)),
            units=units,
        )

    def _units(self, index: int) -> tuple[UnitEvent, ...]:
        """Return what each layer's number formats were in a step; () where none were routed."""
        lines = np.searchsorted(self.columns["units/step_index"], [index, index + 1])
        return tuple(
            UnitEvent(**{name: self.columns[f"units/{name}"][at].item() for name in _UNIT_COLUMNS})
            for at in range(*lines.tolist())
        )

    def _part(self, table: str, index: int, rank: int) -> dict[str, Any]:
        """Return one process's lines of a table in a step, by column."""
        lines = slice(*np.searchsorted(self.columns[f"{table}/step_index"], [index, index + 1]))
        mine = self.columns[f"{table}/rank"][lines] == rank
        names = [name for name in _names(table) if name not in ("step_index", "rank")]
        return {name: self.columns[f"{table}/{name}"][lines][mine] for name in names}

    def _rank_event(self, index: int, line: int) -> RankEvent:
        values: dict[str, Any] = {
            name: self.columns[f"ranks/{name}"][line] for name in _names("ranks")
        }
        del values["step_index"]
        numbers = {name: values[name].item() for name in _RANK_NUMBERS}
        mode = EXCHANGES[values["mode"]]
        rank = numbers["rank"]
        changed = {
            "mode": mode,
            "stage_ms": _reported(values["stage_ms"]),
            "spans": Spans(**self._part("spans", index, rank)),
            "flights": Flights(**self._part("flights", index, rank)),
        }
        return RankEvent(**values | numbers | changed)

    def _of(self, kind: type[N]) -> tuple[N, ...]:
        return tuple(note for _, note in self.notes if isinstance(note, kind))


def count_ids(ids_NLK: Array, size: int) -> Array:
    """Count ids by layer: (L, size) int64; negative ids are "no expert" and not counted.

    Rows [[0, 2]], [[2, -1]] of one layer with size 3 give [[1, 0, 2]].
    """
    layers = ids_NLK.shape[1]
    cells = ids_NLK.astype(np.int64) + np.arange(layers)[:, None] * size
    return np.bincount(cells[ids_NLK >= 0], minlength=layers * size).reshape(layers, size)


_STEP_NUMBERS = (
    "step",
    "time_s",
    "duration_ms",
    "table_version",
    "num_running",
    "num_waiting",
    "num_prefill_rows",
    "bad_rows",
    "look_ups_found",
    "look_ups_missed",
)
_RANK_NUMBERS = ("rank", "wait_ms", "transfer_ms", "busy_ms")
_UNIT_COLUMNS = tuple(f.name for f in fields(UnitEvent))
_DECISION_COLUMNS = tuple(f.name for f in fields(Decision) if f"decisions/{f.name}" in COLUMNS)


def _dropped(topk_ids_TLK: Array, phy_ids_TLK: Array) -> tuple[int, ...]:
    """Return by layer how many slots have an expert and no place; () for none."""
    dropped_TLK = (phy_ids_TLK < 0) & (topk_ids_TLK >= 0)
    return tuple(dropped_TLK.sum((0, 2)).tolist()) if dropped_TLK.any() else ()


def _names(table: str) -> list[str]:
    return [name.split("/")[1] for name in COLUMNS if name.startswith(f"{table}/")]


def _reported(stage_ms: Array) -> dict[str, float]:
    """Return the stages that were reported; (G,) with NaN for the others."""
    return {stage: float(ms) for stage, ms in zip(STAGES, stage_ms, strict=True) if ms == ms}


def _unreported(events: Sequence[StepEvent | RankEvent]) -> Array:
    """Return (events, G) stage times, NaN where none was reported."""
    stage_ms = [[event.stage_ms.get(stage, np.nan) for stage in STAGES] for event in events]
    return np.asarray(stage_ms, np.float64).reshape(len(events), len(STAGES))


def _columns(
    start: StartEvent, steps: Sequence[tuple[int, StepEvent]], decisions: tuple[Decision, ...]
) -> dict[str, Array]:
    events = [event for _, event in steps]
    ranks = [rank for event in events for rank in event.ranks]
    values: dict[str, Any] = {
        "steps/order": [order for order, _ in steps],
        "steps/stage_ms": _unreported(events),
        "steps/row_start": np.cumsum([0, *(event.num_rows for event in events)]),
        "decisions/step_index": np.repeat(
            np.arange(len(events)), [len(event.decisions) for event in events]
        ),
        "ranks/step_index": np.repeat(
            np.arange(len(events)), [len(event.ranks) for event in events]
        ),
        "units/step_index": np.repeat(
            np.arange(len(events)), [len(event.units) for event in events]
        ),
        "ranks/mode": [_mode(rank) for rank in ranks],
        "ranks/stage_ms": _unreported(ranks),
    }
    spans = [
        (index, rank, part)
        for index, event in enumerate(events)
        for rank, part in ((ENGINE, event.spans), *((r.rank, r.spans) for r in event.ranks))
        if len(part.stages)
    ]
    flights = [
        (index, rank.rank, rank.flights)
        for index, event in enumerate(events)
        for rank in event.ranks
        if len(rank.flights.layers)
    ]
    values |= _stacked("spans", spans) | _stacked("flights", flights)
    for name in ("rows", "num_bytes", "messages", *_RANK_NUMBERS):
        values[f"ranks/{name}"] = [getattr(rank, name) for rank in ranks]
    layers = [layer for event in events for layer in event.units]
    for name in _UNIT_COLUMNS:
        values[f"units/{name}"] = [getattr(layer, name) for layer in layers]
    for name in _STEP_NUMBERS:
        values[f"steps/{name}"] = [getattr(event, name) for event in events]
    for name in _names("rows"):
        values[f"rows/{name}"] = _joined(start, name, events)
    for name in _DECISION_COLUMNS:
        values[f"decisions/{name}"] = [getattr(decision, name) for decision in decisions]
    lengths = sizes(
        start,
        steps=len(events),
        rows=sum(e.num_rows for e in events),
        decisions=len(decisions),
        ranks=len(ranks),
        spans=sum(len(part.stages) for _, _, part in spans),
        flights=sum(len(part.layers) for _, _, part in flights),
        units=len(layers),
    )
    return {
        name: _fitted(name, values[name], dtype, tuple(lengths[letter] for letter in letters))
        for name, (dtype, letters) in COLUMNS.items()
    }


def _stacked(table: str, parts: Sequence[tuple[int, int, Any]]) -> dict[str, Any]:
    """Return a table's columns from (step, rank, record of columns), one after the other."""
    names = [name for name in _names(table) if name not in ("step_index", "rank")]
    found: dict[str, Any] = {
        f"{table}/{name}": np.concatenate([getattr(part, name) for _, _, part in parts])
        if parts
        else []
        for name in names
    }
    lengths = [len(getattr(part, names[0])) for _, _, part in parts]
    heads = np.array([part[:2] for part in parts], np.int64).reshape(-1, 2)
    found[f"{table}/step_index"], found[f"{table}/rank"] = np.repeat(heads, lengths, axis=0).T
    return found


def _mode(rank: RankEvent) -> int:
    if rank.mode not in EXCHANGES:
        raise TraceError(f"rank {rank.rank} exchanged rows by the unknown mode {rank.mode!r}.")
    return EXCHANGES.index(rank.mode)


def _joined(start: StartEvent, name: str, events: list[StepEvent]) -> Any:
    """Return one rows column of all steps, refusing a step whose arrays do not fit."""
    lengths = sizes(start, steps=0, rows=0, decisions=0)
    inner = tuple(lengths[letter] for letter in COLUMNS[f"rows/{name}"][1][1:])
    parts = [getattr(event, name) for event in events]
    if name == "drafted":
        parts = [
            np.zeros(event.num_rows, np.uint8) if part is None else part
            for event, part in zip(events, parts, strict=True)
        ]
    if name == "formats":
        parts = [
            part if event.units else np.zeros((event.num_rows, *inner), np.uint8)
            for event, part in zip(events, parts, strict=True)
        ]
    for event, part in zip(events, parts, strict=True):
        if part.shape != (event.num_rows, *inner):
            raise TraceError(
                f"step {event.step}: {name} has shape {part.shape}; "
                f"{(event.num_rows, *inner)} is right for this model."
            )
    return np.concatenate(parts) if parts else []


def _fitted(name: str, values: Any, dtype: str, shape: tuple[int, ...]) -> Array:
    """Return `values` as the column's dtype and shape; never wrap a number around."""
    try:
        column = np.asarray(values) if np.size(values) else np.zeros(shape, dtype)
        if np.issubdtype(np.dtype(dtype), np.integer) and column.size:
            limits = np.iinfo(np.dtype(dtype))
            if column.min() < limits.min or column.max() > limits.max:
                raise TraceError(
                    f"column {name!r} holds {column.max()}; "
                    f"allowed is {limits.min} to {limits.max}."
                )
        return np.ascontiguousarray(column.astype(dtype)).reshape(shape)
    except ValueError:
        raise TraceError(f"column {name!r} cannot take the shape {shape}.") from None
