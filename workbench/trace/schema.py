"""The shape of a `.moetrace` file: its version, its arrays, and their laws.

A trace has seven tables, each a set of columns of equal length:

    steps      one line per forward pass (S)
    rows       one line per token row (N); step s owns rows row_start[s] .. row_start[s + 1]
    decisions  one line per full decision record (M)
    ranks      one line per step and rank (Q), none in one process
    spans      one line per stretch of time that a process spent in a stage (X)
    flights    one line per thing that a rank had under way (F)
    units      one line per step and MoE layer whose number formats were chosen by unit (U)

L counts MoE layers, E logical experts, K experts per token, D devices, G the engine's stages. `-1`
is "no expert". Text and everything else that is not a number stands in `events.json` beside the
arrays; `workbench.trace.store` has the layout of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.config import EXCHANGES, MAX_EXPERTS
from engine.errors import TraceError
from engine.events import CAUSES, STAGES, StartEvent

FORMAT = "moetrace"
VERSION = 5
"""Raised whenever a reader of the version before would misread the file."""

_OLD_STAGES = tuple(s for s in STAGES if s not in ("plan", "draft", "sort", "format"))
STAGES_OF = {
    1: tuple(s for s in _OLD_STAGES if s not in ("wait", "transfer")),
    2: _OLD_STAGES,
    3: _OLD_STAGES,
    4: STAGES,
    5: STAGES,
}
"""The stages of each version that can be read. 1 knew of no ranks; up to 3 `dispatch` holds the
sort, and no level but experts and devices decided."""
TABLES_SINCE = {"ranks": 2, "spans": 3, "flights": 3, "units": 4}
"""The tables that not every version has, and the first that does."""
COLUMNS_SINCE = {
    **{f"rows/{name}": 4 for name in ("drafted", "formats")},
    **{f"decisions/{name}": 4 for name in ("bias", "smoothing", "shut", "capacity", "unit")},
    **{f"steps/look_ups_{name}": 5 for name in ("found", "missed")},
}
"""The columns of a table that not every version has, and the first that does."""
ENGINE = -1
"""In `spans/rank`: the engine's own process."""

MAX_LAYERS = 1024

Array = npt.NDArray[Any]

COLUMNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "steps/order": ("<i8", ("S",)),
    "steps/step": ("<i8", ("S",)),
    "steps/time_s": ("<f8", ("S",)),
    "steps/duration_ms": ("<f8", ("S",)),
    "steps/table_version": ("<i8", ("S",)),
    "steps/num_running": ("<i4", ("S",)),
    "steps/num_waiting": ("<i4", ("S",)),
    "steps/num_prefill_rows": ("<i4", ("S",)),
    "steps/bad_rows": ("<i8", ("S",)),
    "steps/look_ups_found": ("<i8", ("S",)),
    "steps/look_ups_missed": ("<i8", ("S",)),
    "steps/stage_ms": ("<f8", ("S", "G")),
    "steps/row_start": ("<i8", ("S+1",)),
    "rows/request_ids": ("<i8", ("N",)),
    "rows/positions": ("<i4", ("N",)),
    "rows/token_ids": ("<i4", ("N",)),
    "rows/homes": ("<i2", ("N",)),
    "rows/causes": ("|u1", ("N",)),
    "rows/drafted": ("|u1", ("N",)),
    "rows/topk_ids": ("<i2", ("N", "L", "K")),
    "rows/phy_ids": ("<i2", ("N", "L", "K")),
    "rows/topk_weights": ("<f4", ("N", "L", "K")),
    "rows/margins": ("<f4", ("N", "L")),
    "rows/formats": ("|u1", ("N", "L", "K")),
    "decisions/step_index": ("<i8", ("M",)),
    "decisions/request_id": ("<i8", ("M",)),
    "decisions/position": ("<i4", ("M",)),
    "decisions/token_id": ("<i4", ("M",)),
    "decisions/layer": ("<i4", ("M",)),
    "decisions/logits": ("<f4", ("M", "E")),
    "decisions/scores": ("<f4", ("M", "E")),
    "decisions/topk_ids": ("<i2", ("M", "K")),
    "decisions/topk_weights": ("<f4", ("M", "K")),
    "decisions/runner_up": ("<i2", ("M",)),
    "decisions/margin": ("<f8", ("M",)),
    "decisions/physical": ("<i2", ("M", "K")),
    "decisions/devices": ("<i2", ("M", "K")),
    "decisions/table_version": ("<i8", ("M",)),
    "decisions/bias": ("<f4", ("M", "E")),
    "decisions/smoothing": ("<f4", ("M", "E")),
    "decisions/shut": ("|u1", ("M", "E")),
    "decisions/capacity": ("<i8", ("M",)),
    "decisions/unit": ("<i4", ("M",)),
    "ranks/step_index": ("<i8", ("Q",)),
    "ranks/rank": ("<i2", ("Q",)),
    "ranks/mode": ("|u1", ("Q",)),
    "ranks/rows": ("<i8", ("Q", "D")),
    "ranks/num_bytes": ("<i8", ("Q", "D")),
    "ranks/messages": ("<i8", ("Q", "D")),
    "ranks/wait_ms": ("<f8", ("Q",)),
    "ranks/transfer_ms": ("<f8", ("Q",)),
    "ranks/busy_ms": ("<f8", ("Q",)),
    "ranks/stage_ms": ("<f8", ("Q", "G")),
    "spans/step_index": ("<i8", ("X",)),
    "spans/rank": ("<i2", ("X",)),
    "spans/stages": ("|u1", ("X",)),
    "spans/begin_ms": ("<f4", ("X",)),
    "spans/ms": ("<f4", ("X",)),
    "flights/step_index": ("<i8", ("F",)),
    "flights/rank": ("<i2", ("F",)),
    "flights/layers": ("<i2", ("F",)),
    "flights/parts": ("<i2", ("F",)),
    "flights/results": ("|u1", ("F",)),
    "flights/sent_ms": ("<f4", ("F",)),
    "flights/arrived_ms": ("<f4", ("F",)),
    "flights/rows": ("<i4", ("F", "D")),
    "units/step_index": ("<i8", ("U",)),
    "units/layer": ("<i2", ("U",)),
    "units/units": ("<i8", ("U",)),
    "units/int8_units": ("<i8", ("U",)),
    "units/failed_units": ("<i8", ("U",)),
    "units/rows": ("<i8", ("U",)),
    "units/int8_rows": ("<i8", ("U",)),
    "units/rerun_rows": ("<i8", ("U",)),
    "units/sampled_rows": ("<i8", ("U",)),
    "units/switches": ("<i8", ("U",)),
    "units/worst_error": ("<f4", ("U",)),
}
"""Every array of a trace: dtype and the letters of its shape. `stage_ms` holds NaN for a stage
that was not reported; `ranks/mode` is an index into `EXCHANGES`; `rows/formats` is 0 where formats
are not routed."""

TIMES = (
    "steps/time_s",
    "steps/duration_ms",
    "steps/stage_ms",
    "ranks/wait_ms",
    "ranks/transfer_ms",
    "ranks/busy_ms",
    "ranks/stage_ms",
    "spans/begin_ms",
    "spans/ms",
    "flights/sent_ms",
    "flights/arrived_ms",
)
LONGEST = 1e11
"""Most seconds or milliseconds in a column of times."""

_COUNTS = ("rows", "num_bytes", "messages")
_UNIT_COUNTS = (
    *("units", "int8_units", "failed_units", "rows", "int8_rows", "rerun_rows", "sampled_rows"),
    "switches",
)

EXPERT_COLUMNS = ("rows/topk_ids", "decisions/topk_ids", "decisions/runner_up")
"""Columns of logical experts: -1 or 0 .. E - 1."""


def sizes(
    start: StartEvent,
    *,
    steps: int,
    rows: int,
    decisions: int,
    ranks: int = 0,
    spans: int = 0,
    flights: int = 0,
    units: int = 0,
    version: int = VERSION,
) -> dict[str, int]:
    """Return the length behind each letter of `COLUMNS`."""
    return {
        "S": steps,
        "S+1": steps + 1,
        "N": rows,
        "M": decisions,
        "L": len(start.moe_layers),
        "E": start.num_experts,
        "K": start.top_k,
        "D": start.num_devices,
        "G": len(STAGES_OF[version]),
        "Q": ranks,
        "X": spans,
        "F": flights,
        "U": units,
    }


def check_start(start: StartEvent) -> None:
    """Refuse a start record whose sizes cannot be: readers take memory by them.

    Raises:
        TraceError: a size, a layer or a device is out of range.
    """
    layers, ranks = start.moe_layers, start.rank_of_phy
    for name, values, low, high in (
        ("num_experts", (start.num_experts,), 0, MAX_EXPERTS),
        ("top_k", (start.top_k,), 0, start.num_experts),
        ("num_devices", (start.num_devices,), 1, MAX_EXPERTS),
        ("num_layers", (start.num_layers,), len(layers), MAX_LAYERS),
        ("moe_layers", layers, 0, start.num_layers - 1),
        ("rank_of_phy", ranks, -1, MAX_EXPERTS),
    ):
        for value in values:
            if not low <= value <= high:
                raise TraceError(
                    f"its start record says {name} {value}; allowed is {low} to {high}."
                )


def check(start: StartEvent, columns: Mapping[str, Array]) -> None:
    """Refuse columns that break a law of the format.

    Raises:
        TraceError: a column is missing, has another dtype or shape, or holds an id out of range.
    """
    check_start(start)
    missing = [name for name in COLUMNS if name not in columns]
    if missing:
        raise TraceError(f"the trace lacks the column {missing[0]!r}.")
    lengths = sizes(
        start,
        steps=len(columns["steps/step"]),
        rows=len(columns["rows/token_ids"]),
        decisions=len(columns["decisions/layer"]),
        ranks=len(columns["ranks/rank"]),
        spans=len(columns["spans/rank"]),
        flights=len(columns["flights/rank"]),
        units=len(columns["units/layer"]),
    )
    for name, (dtype, letters) in COLUMNS.items():
        shape = tuple(lengths[letter] for letter in letters)
        column = columns[name]
        if column.shape != shape or column.dtype != np.dtype(dtype):
            raise TraceError(
                f"column {name!r} has shape {column.shape} and dtype {column.dtype}; "
                f"the trace's start record asks for {shape} and {np.dtype(dtype)}."
            )
    _check_laws(start, columns)


def _check_laws(start: StartEvent, columns: Mapping[str, Array]) -> None:
    for name in EXPERT_COLUMNS:
        _check_range(name, columns[name], -1, start.num_experts - 1)
    for name in ("rows/phy_ids", "decisions/physical"):
        _check_range(name, columns[name], -1, np.iinfo(np.int16).max)
    _check_range("rows/causes", columns["rows/causes"], 0, len(CAUSES) - 1)
    for name in TIMES:
        column = columns[name]
        if name.endswith("/stage_ms"):
            column = column[~np.isnan(column)]
        if not ((column >= 0) & (column <= LONGEST)).all():
            raise TraceError(f"column {name!r} holds a time that is not within 0 to {LONGEST:g}.")
    num_steps = len(columns["steps/step"])
    indices = [f"{table}/step_index" for table in ("decisions", *TABLES_SINCE)]
    last_device, last_layer = start.num_devices - 1, len(start.moe_layers) - 1
    for name, low, high in (
        *((name, 0, num_steps - 1) for name in indices),
        ("ranks/rank", 0, last_device),
        ("spans/rank", ENGINE, last_device),
        ("flights/rank", 0, last_device),
        ("ranks/mode", 0, len(EXCHANGES) - 1),
        ("spans/stages", 0, len(STAGES) - 1),
        ("rows/drafted", 0, 1),
        ("decisions/shut", 0, 1),
        ("decisions/capacity", -1, np.iinfo(np.int64).max),
        ("decisions/unit", -1, np.iinfo(np.int32).max),
        ("flights/layers", 0, last_layer),
        ("flights/results", 0, 1),
        ("units/layer", 0, last_layer),
        *((f"units/{name}", 0, np.iinfo(np.int64).max) for name in _UNIT_COUNTS),
        *((f"ranks/{name}", 0, np.iinfo(np.int64).max) for name in _COUNTS),
        ("flights/parts", 0, np.iinfo(np.int16).max),
        ("flights/rows", 0, np.iinfo(np.int32).max),
    ):
        _check_range(name, columns[name], low, high)
    row_start = columns["steps/row_start"]
    if row_start[0] != 0 or row_start[-1] != len(columns["rows/token_ids"]):
        raise TraceError("column 'steps/row_start' does not span the rows of the trace.")
    for name in ("steps/row_start", *indices):
        if (np.diff(columns[name]) < 0).any():
            raise TraceError(f"column {name!r} must not descend.")
    if (np.diff(columns["steps/order"]) <= 0).any():
        raise TraceError("column 'steps/order' must ascend.")


def _check_range(name: str, column: Array, low: int, high: int) -> None:
    if column.size == 0:
        return
    for value in (int(column.min()), int(column.max())):
        if not low <= value <= high:
            raise TraceError(f"column {name!r} holds {value}; allowed is {low} to {high}.")
