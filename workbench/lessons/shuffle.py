"""The control for every claim about domains: the same texts under each other's names."""

from __future__ import annotations

import random
from dataclasses import replace

from engine.events import ControlEvent
from workbench.trace import Trace
from workbench.views.rows import request_domains


def shuffle_domains(trace: Trace, *, seed: int = 0) -> Trace:
    """Return the trace with the labels of its requests dealt out anew, as many of each.

    Tokens of one text stay together, because they are not independent of each other.
    """
    labels = request_domains(trace)
    dealt = list(labels.values())
    random.Random(seed).shuffle(dealt)
    new = dict(zip(labels, dealt, strict=True))

    notes = tuple(
        (
            order,
            note if isinstance(note, ControlEvent) else replace(note, label=new[note.request_id]),
        )
        for order, note in trace.notes
    )
    return replace(trace, notes=notes)
