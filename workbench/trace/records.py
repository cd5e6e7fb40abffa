"""Events as JSON values and back, with every field's type checked on the way in."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np

from engine.errors import TraceError
from engine.events import ControlEvent, Decision, RequestEvent, StartEvent, TextEvent
from workbench.trace.schema import COLUMNS, VERSION, Array, check_start
from workbench.trace.trace import Note, Trace

R = TypeVar("R")

_KINDS: dict[str, type[RequestEvent] | type[TextEvent] | type[ControlEvent]] = {
    "request": RequestEvent,
    "text": TextEvent,
    "control": ControlEvent,
}
_TEXTS = tuple(f.name for f in fields(Decision) if f"decisions/{f.name}" not in COLUMNS)
_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (float, int),
    "str": (str,),
    "bool": (bool,),
    "str | None": (str, type(None)),
    "dict[str, Any]": (dict,),
    "dict[str, float]": (dict,),
    "tuple[int, ...]": (list,),
    "tuple[str, ...]": (list,),
}
"""By the annotation of a field: what JSON may hold for it."""
_LATER_TEXTS = ("format_reason", "model", "verdict", "looked_up", "stage_ms")
"""What a decision did not tell before version 4."""


def to_json(value: Any) -> bytes:
    """Return `value` as JSON; numpy numbers and arrays become plain ones.

    Raises:
        TraceError: something in it is no JSON value.
    """
    try:
        return json.dumps(value, separators=(",", ":"), default=_plain).encode()
    except (TypeError, ValueError) as wrong:
        raise TraceError(f"an event cannot be written as JSON: {wrong}.") from None


def pack(record: Any) -> dict[str, Any]:
    """Return a flat record as a JSON object."""
    return {f.name: getattr(record, f.name) for f in fields(record)}


def unpack(kind: type[R], value: Any) -> R:
    """Return the record that `pack` made `value` from.

    Raises:
        TraceError: a field is missing, unknown, or of another type.
    """
    known = {f.name: str(f.type) for f in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(value, dict) or value.keys() != known.keys():
        raise TraceError(f"a {kind.__name__} does not have the fields {', '.join(known)}.")
    checked = {name: _checked(kind, name, known[name], value[name]) for name in known}
    return kind(**checked)


def unpack_start(value: Any) -> StartEvent:
    """Return the start event, refusing shapes that make no sense.

    Raises:
        TraceError: a field is missing, of another type, or out of range.
    """
    start = unpack(StartEvent, value)
    check_start(start)
    return start


def pack_events(trace: Trace) -> dict[str, Any]:
    """Return the notes and the decisions' texts as one JSON object."""
    names = {kind: name for name, kind in _KINDS.items()}
    return {
        "notes": [[order, names[type(note)], pack(note)] for order, note in trace.notes],
        "decisions": [{name: getattr(d, name) for name in _TEXTS} for d in trace.decisions],
    }


def unpack_notes(values: Any) -> tuple[tuple[int, Note], ...]:
    """Return the notes in order.

    Raises:
        TraceError: a note is not one of the known kinds, or the order does not ascend.
    """
    notes: list[tuple[int, Note]] = []
    for value in values:
        order, kind, record = value
        if kind not in _KINDS or type(order) is not int:
            raise TraceError(f"a note has the unknown kind {kind!r}.")
        if notes and order <= notes[-1][0]:
            raise TraceError("its notes are out of order.")
        notes.append((order, unpack(_KINDS[kind], record)))
    return tuple(notes)


def unpack_decisions(
    texts: Any, columns: dict[str, Array], version: int = VERSION
) -> tuple[Decision, ...]:
    """Join the decisions' texts with their columns; what a version did not tell stays unsaid.

    Raises:
        TraceError: there are not as many texts as lines, or a text has another type.
    """
    lines = len(columns["decisions/layer"])
    if not isinstance(texts, list) or len(texts) != lines:
        raise TraceError(f"it has {lines} decision lines but other than {lines} texts.")
    known = {f.name: str(f.type) for f in fields(Decision)}
    told = tuple(name for name in _TEXTS if version >= 4 or name not in _LATER_TEXTS)
    decisions = []
    for line, text in enumerate(texts):
        if not isinstance(text, dict) or text.keys() != set(told):
            raise TraceError(f"a decision does not have the texts {', '.join(told)}.")
        values = {name: _checked(Decision, name, known[name], text[name]) for name in told}
        for name in known.keys() - set(_TEXTS):
            value = columns[f"decisions/{name}"][line]
            values[name] = value if value.ndim else value.item()
        decisions.append(Decision(**values))
    return tuple(decisions)


def _checked(kind: type, name: str, annotation: str, value: Any) -> Any:
    if type(value) not in _TYPES[annotation]:
        raise TraceError(f"{kind.__name__}.{name} is {value!r}, not {annotation}.")
    if annotation.startswith("tuple"):
        wanted = int if "int" in annotation else str
        if any(type(item) is not wanted for item in value):
            raise TraceError(f"{kind.__name__}.{name} is not {annotation}.")
        return tuple(value)
    if annotation == "dict[str, float]":
        if any(type(ms) not in (int, float) or not math.isfinite(ms) for ms in value.values()):
            raise TraceError(f"{kind.__name__}.{name} is not {annotation}.")
    if annotation == "float" and not math.isfinite(value):
        raise TraceError(f"{kind.__name__}.{name} is {value!r}, not a finite number.")
    return float(value) if annotation == "float" else value


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON value")
