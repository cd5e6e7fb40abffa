"""Stage times, overhead by step, in all, and by batch size: every share with both its parts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.events import ROUTING_STAGES, STAGES
from tests.views.handmade import Row, from_steps, start, step
from workbench import views

START = start()


def rows(count):
    return [Row(request, 0, [(0, 1)]) for request in range(count)]


def timed(number, count, duration_ms, *, prefill=0, **stage_ms):
    return step(
        START, number, rows(count), duration_ms=duration_ms, stage_ms=stage_ms, prefill=prefill
    )


# 1 ms with 0.2 ms of routing (20 %), and 9 ms with 0.2 ms (2.2 %).
TWO = from_steps(
    [
        timed(0, 1, 1.0, select=0.1, place=0.04, sort=0.06, experts=0.5),
        timed(1, 4, 9.0, select=0.1, place=0.1, experts=5.0, attention=3.0),
    ]
)


def test_the_stages_of_a_step_and_the_unaccounted_rest_make_the_whole():
    table = views.stage_times(TWO)
    assert len(table) == 2 * (len(STAGES) + 1)
    assert table.groupby("step")["ms"].sum().tolist() == pytest.approx([1.0, 9.0])
    other = table[table["stage"] == "other"]
    assert other["ms"].tolist() == pytest.approx([0.3, 0.8])
    assert other["share"].tolist() == pytest.approx([0.3, 0.8 / 9])
    assert table["num_rows"].unique().tolist() == [1, 4]


def test_a_stage_a_step_did_not_report_is_not_zero():
    table = views.stage_times(TWO)
    missing = table[(table["stage"] == "sort") & (table["step"] == 1)]
    assert missing["ms"].isna().all() and missing["share"].isna().all()
    totals = views.stage_totals(TWO).set_index("stage")
    assert totals.loc["sort", "steps"] == 1
    assert totals.loc["sort", "ms_per_step"] == pytest.approx(0.06)
    assert totals.loc["sample", "steps"] == 0 and math.isnan(totals.loc["sample", "ms_per_step"])


def test_totals_are_shares_of_all_the_time():
    totals = views.stage_totals(TWO).set_index("stage")
    assert totals.loc["experts", "ms"] == pytest.approx(5.5)
    assert totals.loc["experts", "share"] == pytest.approx(0.55)
    assert totals["share"].sum() == pytest.approx(1.0)
    assert totals.loc["other", "ms_per_step"] == pytest.approx(0.55)


def test_every_stage_has_a_kind_and_the_gates_product_is_computing():
    kinds = {stage: views.stage_kind(stage) for stage in (*STAGES, "other")}
    assert {stage for stage, kind in kinds.items() if kind == "routing"} == set(ROUTING_STAGES)
    assert kinds["gate"] == "compute" and kinds["other"] == "rest"


def test_the_overhead_of_a_step_has_numerator_denominator_and_state():
    table = views.overhead_by_step(TWO)
    assert table["routing_ms"].tolist() == pytest.approx([0.2, 0.2])
    assert table["step_ms"].tolist() == [1.0, 9.0]
    assert table["share"].tolist() == pytest.approx([0.2, 0.2 / 9])
    assert table["state"].tolist() == ["redesign", "within"]
    assert table["place_ms"].tolist() == pytest.approx([0.04, 0.1])


def test_a_step_says_of_itself_what_the_view_says_of_it():
    table = views.overhead_by_step(TWO)
    own = [TWO.step_event(at).overhead_share for at in range(2)]
    assert table["share"].tolist() == pytest.approx(own)


def test_the_total_weighs_steps_by_their_time_and_is_not_the_mean_of_shares():
    total = views.overhead_total(TWO).iloc[0]
    assert (total["routing_ms"], total["step_ms"]) == (pytest.approx(0.4), 10.0)
    assert total["share"] == pytest.approx(0.04)
    assert total["state"] == "within"
    assert (total["steps"], total["steps_watch"], total["steps_redesign"]) == (2, 0, 1)
    mean = views.overhead_by_step(TWO)["share"].mean()
    assert abs(total["share"] - mean) > 0.05


def test_a_step_without_times_has_no_share_and_takes_no_part():
    unknown = from_steps([timed(0, 1, 0.0, select=0.1), timed(1, 1, 2.0, experts=1.0)])
    table = views.overhead_by_step(unknown)
    assert table["share"].isna().all() and table["state"].tolist() == ["unknown"] * 2
    assert views.overhead_total(unknown).empty and views.overhead_by_batch(unknown).empty
    assert views.stage_times(unknown)["share"].notna().sum() == 2


@pytest.mark.parametrize(
    ("share", "state"),
    [(0.0, "within"), (0.05, "within"), (0.0501, "watch"), (0.1, "watch"), (0.1001, "redesign")],
)
def test_the_marks_belong_to_the_lower_state(share, state):
    assert views.overhead_state(share) == state


def test_the_marks_are_data():
    assert views.overhead_marks()["share"].tolist() == [0.05, 0.10]
    assert views.overhead_marks()["state"].tolist() == ["watch", "redesign"]


BATCHES = from_steps(
    [
        timed(0, 1, 2.0, select=0.4),
        timed(1, 2, 2.0, select=0.14),
        timed(2, 3, 4.0, select=0.1),
        timed(3, 7, 5.0, select=0.1),
        timed(4, 8, 10.0, select=0.1),
        timed(5, 15, 10.0, select=0.3, prefill=15),
        timed(6, 0, 1.0, select=0.9),
    ]
)


def test_batches_are_grouped_by_powers_of_two_so_that_eight_begins_a_line():
    table = views.overhead_by_batch(BATCHES)
    assert table["rows_from"].tolist() == [1, 2, 4, 8]
    assert table["rows_to"].tolist() == [1, 3, 7, 15]
    assert table["steps"].tolist() == [1, 2, 1, 2]
    assert table["rows"].tolist() == [1, 5, 7, 23]


def test_a_batch_sizes_share_is_the_sum_over_the_sum():
    table = views.overhead_by_batch(BATCHES).set_index("rows_from")
    assert table.loc[2, "routing_ms"] == pytest.approx(0.24)
    assert table.loc[2, "step_ms"] == 6.0
    assert table.loc[2, "share"] == pytest.approx(0.04)
    assert table.loc[2, "share_p50"] == pytest.approx((0.07 + 0.025) / 2)
    assert table.loc[2, "routing_us_per_row"] == pytest.approx(240 / 5)
    assert table["state"].tolist() == ["redesign", "within", "within", "within"]


def test_steps_with_prompt_rows_can_be_left_out():
    table = views.overhead_by_batch(BATCHES, decode_only=True).set_index("rows_from")
    assert table.loc[8, "steps"] == 1 and table.loc[8, "share"] == pytest.approx(0.01)


TIMES = st.floats(0.01, 5.0)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), TIMES, TIMES, TIMES), max_size=8))
def test_the_batch_sizes_sum_to_the_total(steps):
    made = from_steps(
        [
            timed(at, count, select + experts + rest, select=select, experts=experts)
            for at, (count, select, experts, rest) in enumerate(steps)
        ]
    )
    table, timed_rows = views.overhead_by_batch(made), [s for s in steps if s[0]]
    assert table["steps"].sum() == len(timed_rows)
    assert table["routing_ms"].sum() == pytest.approx(sum(s[1] for s in timed_rows))
    assert ((table["rows"] >= table["rows_from"] * table["steps"]).all()) and (
        (table["rows"] <= table["rows_to"] * table["steps"]).all()
    )
