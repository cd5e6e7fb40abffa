"""Plotly figures, one for each view, of the same name: a table in, a figure out, nothing else.

    from workbench import figures, views
    figures.expert_load(views.expert_load(trace), theme="dark")

Every figure says in its title what is drawn over what and in which unit, in its subtitle what is to
be seen, and at the upper right where the numbers come from. Pointing at a mark shows the exact
numbers. A table without lines gives a sheet that says so.
"""

from __future__ import annotations

from workbench.figures.balance import load_balance
from workbench.figures.domains import domain_load
from workbench.figures.drafts import draft_acceptance
from workbench.figures.dropped import dropped_slots
from workbench.figures.formats import unit_formats
from workbench.figures.jumps import jump_rate
from workbench.figures.load import device_load, expert_load
from workbench.figures.looked_up import look_ups
from workbench.figures.overhead import overhead_by_batch, overhead_by_step, overhead_total
from workbench.figures.ranks import rank_times
from workbench.figures.stages import stage_times, stage_totals
from workbench.figures.tokens import token_experts
from workbench.figures.traffic import device_traffic
from workbench.theme import THEMES

__all__ = [
    "THEMES",
    "device_load",
    "device_traffic",
    "domain_load",
    "draft_acceptance",
    "dropped_slots",
    "expert_load",
    "jump_rate",
    "load_balance",
    "look_ups",
    "overhead_by_batch",
    "overhead_by_step",
    "overhead_total",
    "rank_times",
    "stage_times",
    "stage_totals",
    "token_experts",
    "unit_formats",
]
