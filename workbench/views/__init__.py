"""Tidy tables from a trace: one function per question, one file per function, nothing drawn.

    from workbench import figures, views
    table = views.expert_load(trace)
    figures.expert_load(table, theme="dark")

Every view takes a `workbench.trace.Trace` (a file's, or a recorder's recent window) and returns a
DataFrame whose columns, dtypes and units stand in the file's `…COLUMNS`, whatever the trace holds:
an empty trace or a dense model gives the same columns and no rows. Each view has a `label`:
`recorded` for a trace out of a file, `measured` for one an engine is still writing; what is
computed from a model of the machine calls itself `modelled`. `layer` is the model's own layer
number, as `workbench explain --layer` takes it.
"""

from __future__ import annotations

from workbench.views.balance import BALANCE_FORMULAS, load_balance, measures
from workbench.views.batch import overhead_by_batch
from workbench.views.devices import device_load
from workbench.views.domains import domain_load
from workbench.views.drafts import draft_acceptance
from workbench.views.dropped import dropped_slots
from workbench.views.formats import unit_formats
from workbench.views.jumps import jump_rate
from workbench.views.load import expert_load
from workbench.views.looked_up import look_ups
from workbench.views.overhead import (
    MARKS,
    overhead_by_step,
    overhead_marks,
    overhead_state,
    overhead_total,
)
from workbench.views.ranks import rank_times
from workbench.views.rows import ACCEPTED
from workbench.views.stages import stage_kind, stage_times, stage_totals
from workbench.views.tidy import LABELS, Column, Label
from workbench.views.tokens import token_experts
from workbench.views.traffic import device_traffic

__all__ = [
    "ACCEPTED",
    "BALANCE_FORMULAS",
    "LABELS",
    "MARKS",
    "Column",
    "Label",
    "device_load",
    "device_traffic",
    "domain_load",
    "draft_acceptance",
    "dropped_slots",
    "expert_load",
    "jump_rate",
    "load_balance",
    "look_ups",
    "measures",
    "overhead_by_batch",
    "overhead_by_step",
    "overhead_marks",
    "overhead_state",
    "overhead_total",
    "rank_times",
    "stage_kind",
    "stage_times",
    "stage_totals",
    "token_experts",
    "unit_formats",
]
