"""Which rows of a trace a view counts, and which domain they belong to."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from engine.errors import ConfigError
from engine.events import CAUSES, RequestEvent, TextEvent
from workbench.trace.schema import Array
from workbench.trace.trace import Trace

ACCEPTED = ("accepted",)
"""The rows that count once per token. A row run again (after a preemption, a recovery, a rejected
draft, a change of precision) is work, but not another token."""


def chosen_rows(trace: Trace, causes: Collection[str] | None) -> Array:
    """Return (N,) bool: the rows that ran for one of `causes`; None takes all.

    Raises:
        ConfigError: a cause the engine does not know.
    """
    if causes is None:
        return np.ones(trace.num_rows, bool)
    unknown = [cause for cause in causes if cause not in CAUSES]
    if unknown:
        raise ConfigError(
            f"cause ({unknown[0]!r}) must be one of {', '.join(CAUSES)}; None takes all rows."
        )
    codes = [CAUSES.index(cause) for cause in causes]
    return np.isin(trace.columns["rows/causes"], codes)


def request_domains(trace: Trace) -> dict[int, str]:
    """Return the label of every request the trace's notes speak of.

    A recorder under pressure drops old notes; any later note of the request names it again.
    """
    return {
        note.request_id: note.label
        for _, note in trace.notes
        if isinstance(note, RequestEvent | TextEvent)
    }


def row_domains(trace: Trace) -> Array:
    """Return (N,) the label of each row's request, "" where it is not known."""
    domains = request_domains(trace)
    ids, of_row = np.unique(trace.columns["rows/request_ids"], return_inverse=True)
    names = np.array([domains.get(request, "") for request in ids.tolist()], dtype=object)
    return names[of_row]


def row_steps(trace: Trace, name: str) -> Array:
    """Return (N,) the value of a `steps` column for the step of each row."""
    return trace.columns[f"steps/{name}"][trace.row_steps]
