"""Probes of time and of work done again, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from engine.events import CAUSES, STAGES, ControlEvent
from engine.routing.placement import contiguous
from workbench.drills.probes import rows_a_token
from workbench.drills.probes_deploy import recovered_rows
from workbench.drills.probes_time import prompt_stage_ratio, slow_stage_ratio, stage_ratio
from workbench.drills.readings import Readings, Unreadable


class FakeTrace:
    """Steps of 10 ms, each with ten rows."""

    def __init__(self, prefill=(), controls=(), again=0, rejected=0, **stages):
        num_steps = len(prefill)
        self.num_rows, self.controls = 10 * num_steps, list(controls)
        stage_ms = np.zeros((num_steps, len(STAGES)))
        for name, values in stages.items():
            stage_ms[:, STAGES.index(name)] = values
        causes = np.zeros(self.num_rows, np.uint8)
        causes[:again] = CAUSES.index("recovery")
        causes[again : again + rejected] = CAUSES.index("rejected_draft")
        self.columns = {
            "rows/causes": causes,
            "steps/num_prefill_rows": np.array(prefill),
            "steps/duration_ms": np.full(num_steps, 10.0),
            "steps/stage_ms": stage_ms,
        }


def readings(trace):
    return Readings(trace=trace, table_now=contiguous(1, 4, 2), planned={}, ask=list)


def recovered(rows_again):
    return ControlEvent("recover", {"rows_again": rows_again}, 0, 0.0)


PROMPTS = {"prefill": [5, 0, 5, 0, 5], "select": [1, 9, 2, 9, 3], "gate": [0.5, 9, 0.5, 9, 0.5]}


def test_a_stage_is_measured_where_a_prompt_runs_and_nowhere_else():
    seen = readings(FakeTrace(**PROMPTS))
    assert prompt_stage_ratio(seen, stage="select", other="gate", rows=50) == pytest.approx(4)


def test_slow_steps_show_what_a_median_hides():
    seen = readings(FakeTrace([0] * 5, select=[2, 2, 2, 100, 100], sort=[1] * 5))
    assert stage_ratio(seen, stage="select", other="sort", rows=50) == pytest.approx(41.2)
    assert slow_stage_ratio(seen, stage="select", other="sort", rows=50) == pytest.approx(100)
    with pytest.raises(Unreadable, match="draft was not reported"):
        stage_ratio(seen, stage="select", other="draft", rows=50)


def test_few_prompts_or_an_unreported_stage_say_nothing():
    few = readings(FakeTrace(**PROMPTS | {"prefill": [5, 0, 0, 0, 5]}))
    with pytest.raises(Unreadable, match="too few steps with prompts"):
        prompt_stage_ratio(few, stage="select", other="gate", rows=50)
    with pytest.raises(Unreadable, match="draft was not reported"):
        prompt_stage_ratio(readings(FakeTrace(**PROMPTS)), stage="select", other="draft", rows=50)


def test_rows_of_failed_steps_and_of_requests_that_moved_count_as_run_again():
    assert recovered_rows(readings(FakeTrace([0] * 10)), rows=100) == 0
    notes = [recovered(7), ControlEvent("publish_table", {}, 1, 0.0), recovered(5)]
    again = FakeTrace([0] * 10, controls=notes, again=3)
    assert recovered_rows(readings(again), rows=100) == pytest.approx(0.15)


def test_a_token_costs_the_rows_of_its_rejected_proposals_and_no_prompts():
    seen = readings(FakeTrace([10, 0, 0], rejected=8))
    assert rows_a_token(seen, rows=30) == pytest.approx(20 / 12)
    with pytest.raises(Unreadable, match="no token was gained"):
        rows_a_token(readings(FakeTrace([10, 10])), rows=20)
