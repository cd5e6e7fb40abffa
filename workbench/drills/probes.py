"""What an operator can measure: the only things a check ever looks at.

A probe reads the trace since the last change, the running table, the record of planned tables, the
answers the engine gives, and nothing else. It never learns what a drill has broken. A probe that
has too little to go by raises `Unreadable` with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.routing.table import RoutingTable
from workbench.trace.schema import Array
from workbench.trace.trace import Trace

ROWS = 400
"""Token rows a probe wants to see unless told otherwise."""


class Unreadable(Exception):
    """A probe could not be taken; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Readings:
    """What an operator has before them."""

    trace: Trace
    """What the engine recorded since the last change anybody made."""
    table: RoutingTable
    """The routing table the engine reads now."""
    planned: Mapping[str, object]
    """The newest entry of the change record: `version` and `sha256` of the table as planned."""
    ask: Callable[[], Sequence[int]] = field(repr=False)
    """Asks the known questions; returns the first token of each answer."""
    known: Sequence[int] = ()
    """The answers the engine gave before the drill."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """How a probe's value is to be read."""

    unit: str
    """`share` (0 to 1), `ratio` or `count`."""
    formula: str
    live: bool = True
    """Whether it may be sampled all the time; asking questions costs too much for that."""
    remark: str = ""
    """What to know of a value outside of what is right."""


def jump_rate(readings: Readings, rows: int = ROWS) -> float:
    """Return the share of neighbouring tokens whose sets of experts differ, over all layers."""
    from workbench import views

    _enough(readings.trace, rows)
    table = views.jump_rate(readings.trace)
    both = table[table["choice"] == "set"]
    return float(both["jumps"].sum() / max(1, both["pairs"].sum()))


def route_change_rate(readings: Readings, rows: int = ROWS) -> float:
    """Return the share of neighbouring tokens sent to different sets of devices, over all layers.

    What the exchange sees of jumps: experts on one device may change without it.
    """
    trace = readings.trace
    _enough(trace, rows)
    devices_NLK = np.sort(_devices(readings), axis=-1)
    requests, positions = trace.columns["rows/request_ids"], trace.columns["rows/positions"]
    order = np.lexsort((positions, requests))
    next_to = (np.diff(requests[order]) == 0) & (np.diff(positions[order]) == 1)
    used_NLG = (devices_NLK[..., None] == np.arange(readings.table.num_devices)).any(axis=2)[order]
    changed = (used_NLG[1:] != used_NLG[:-1]).any(axis=-1)[next_to]
    return float(changed.mean()) if changed.size else 0.0


def busiest_device(readings: Readings, rows: int = ROWS) -> float:
    """Return max(n) / mean(n) of the rows n by device, in the layer where that is largest."""
    from workbench import views

    _enough(readings.trace, rows)
    table = readings.table
    loads = views.device_load(readings.trace, tables={table.version: table.rank_of_phy.tolist()})
    return float(loads["load"].max())


def busiest_expert(readings: Readings, rows: int = ROWS) -> float:
    """Return the share of tokens that chose the most chosen expert of any layer."""
    _enough(readings.trace, rows)
    return float(readings.trace.expert_counts().max() / readings.trace.num_rows)


def misplaced_rows(readings: Readings, rows: int = ROWS) -> float:
    """Return the share of rows that ran where the running table holds another expert."""
    trace, table = readings.trace, readings.table
    _enough(trace, rows)
    phy_NLK = trace.columns["rows/phy_ids"].astype(np.int64)
    held_NLK = table.phy2log[np.arange(table.num_layers)[:, None], phy_NLK]
    return float((held_NLK != trace.columns["rows/topk_ids"]).mean())


def unplanned_table(readings: Readings) -> float:
    """Return 0 when the running table's hash is the one in the change record, else 1."""
    return float(readings.table.sha256() != readings.planned.get("sha256"))


def answers_kept(readings: Readings) -> float:
    """Return the share of known questions answered with the same token as before the drill."""
    if not readings.known:
        raise Unreadable("no answers were written down before the drill.")
    given = np.asarray(readings.ask())
    return float((given == np.asarray(readings.known)).mean())


def broken_rows(readings: Readings) -> float:
    """Return how many rows had gate logits that are not finite numbers."""
    return float(readings.trace.columns["steps/bad_rows"].sum())


def device_rows(readings: Readings) -> list[list[int]]:
    """Return (L, G) rows by layer and device; no probe, but what an operator looks at."""
    grid = np.arange(readings.table.num_devices)
    rows: list[list[int]] = (_devices(readings)[..., None] == grid).sum(axis=(0, 2)).tolist()
    return rows


PROBES: dict[str, Callable[..., float]] = {
    probe.__name__: probe
    for probe in (
        jump_rate,
        route_change_rate,
        busiest_device,
        busiest_expert,
        misplaced_rows,
        unplanned_table,
        answers_kept,
        broken_rows,
    )
}
"""By name, as drill files call them."""

MEANINGS = {
    "jump_rate": Meaning("share", "pairs of neighbouring tokens with other experts / pairs"),
    "route_change_rate": Meaning(
        "share", "pairs of neighbouring tokens sent to other devices / pairs"
    ),
    "busiest_device": Meaning("ratio", "max(rows by device) / mean(rows by device), worst layer"),
    "busiest_expert": Meaning(
        "share",
        "tokens that chose the expert / tokens, worst layer",
        remark="This is what the gate chooses, not where it runs: it may stay high after a repair "
        "that only changes where experts are held.",
    ),
    "misplaced_rows": Meaning("share", "rows run where another expert is held / rows"),
    "unplanned_table": Meaning("count", "0: the running table is the planned one; 1: it is not"),
    "answers_kept": Meaning("share", "known questions answered as before / questions", live=False),
    "broken_rows": Meaning("count", "rows with gate logits that are not finite"),
}


def _devices(readings: Readings) -> Array:
    """Return (N, L, K) the device each row ran on."""
    return readings.table.rank_of_phy[readings.trace.columns["rows/phy_ids"].astype(np.int64)]


def _enough(trace: Trace, rows: int) -> None:
    if trace.num_rows < rows:
        raise Unreadable(
            f"only {trace.num_rows} of the {rows} rows it takes have run since the last change; "
            "try again in a moment."
        )
