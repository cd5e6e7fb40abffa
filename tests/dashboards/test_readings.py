"""What is read out of a frame is what the frame says."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dashboards import readings
from engine.events import ROUTING_STAGES, STAGES


def test_load_is_a_multiple_of_the_fair_share(source):
    frame = source.step(20)
    load = readings.expert_load(frame)
    assert load is not None and not load.idle
    rows_LE = frame.arrays["smoothed"].sum(axis=0)
    expected = rows_LE / rows_LE.sum(axis=1, keepdims=True) * rows_LE.shape[1]
    np.testing.assert_allclose(load.share_LE, expected, rtol=1e-5)
    np.testing.assert_allclose(load.share_LE.mean(axis=1), 1.0, rtol=1e-5)
    assert load.share_LE.max() <= 8 / 2 + 1e-5, "a top-2 gate over 8 cannot exceed 4 times"
    assert load.rows == pytest.approx(rows_LE[0].sum() / 2, rel=1e-5)


def test_the_load_of_a_domain_is_its_own(source):
    frame = source.step(20)
    at = frame.meta["domains"].index("de")
    rows_LE = frame.arrays["smoothed"][at]
    load = readings.expert_load(frame, "de")
    np.testing.assert_allclose(
        load.share_LE, rows_LE / rows_LE.sum(axis=1, keepdims=True) * 8, rtol=1e-5
    )
    assert not np.allclose(load.share_LE, readings.expert_load(frame, "fr").share_LE)


def test_an_idle_engine_has_no_load_whatever_it_did_before(source):
    source.step(50)
    load = readings.expert_load(source.wait(3.0))
    assert load.idle and load.share_LE.max() == 0.0 and load.rows == 0.0


def test_an_unknown_domain_is_idle_and_no_engine_has_no_load(source):
    load = readings.expert_load(source.step(5), "klingon")
    assert load.idle and load.share_LE.shape == (4, 8)
    assert readings.expert_load(None) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (math.nan, "–"), (math.inf, "–"), (0, "0"), (1234567.4, "1\u202f234\u202f567")],
)
def test_numbers_have_thin_spaces_and_none_is_a_dash(value, text):
    assert readings.number(value) == text


def test_times_have_three_figures():
    assert [readings.milliseconds(v) for v in (None, 1.234, 12.34, 1234.5)] == [
        "–",
        "1.23",
        "12.3",
        "1\u202f234",
    ]


def test_the_engine_is_named_in_one_line(source):
    assert readings.engine_line(None) == "Waiting for the engine"
    line = readings.engine_line(source.step())
    for part in ("synthetic", "4 MoE layers × 8 experts", "top-2", "2 logical devices", "v1"):
        assert part in line


def test_every_stage_has_a_kind():
    kinds = {stage: readings.stage_kind(stage) for stage in STAGES}
    assert {stage for stage, kind in kinds.items() if kind == "routing"} == set(ROUTING_STAGES)
    assert set(kinds.values()) == {"routing", "compute", "rest"}


def test_a_sparkline_starts_at_zero_and_breaks_where_there_is_nothing():
    assert readings.spark_path([]) == readings.spark_path([1.0]) == ""
    path = readings.spark_path([0.0, 10.0, math.nan, 5.0, 5.0], width=100, height=28)
    assert path == "M0.0 27.0L25.0 1.0M75.0 14.0L100.0 14.0"
    assert readings.spark_path([0.0, 0.0]) == "M0.0 27.0L100.0 27.0"


@pytest.mark.parametrize(
    ("share", "words", "tone"),
    [
        (0.0, "✓ within 5 %", "good"),
        (0.05, "✓ within 5 %", "good"),
        (0.0501, "▲ above 5 %: watch it", "warn"),
        (0.10, "▲ above 5 %: watch it", "warn"),
        (0.11, "■ above 10 %: rebuild the router", "bad"),
        (3.0, "■ above 10 %: rebuild the router", "bad"),
    ],
)
def test_overhead_is_judged_by_the_5_and_10_per_cent_rule(share, words, tone):
    said = readings.overhead(share)
    assert said["overhead_words"] == words and said["overhead_class"] == f"tone-{tone}"
    width = float(said["overhead_fill"].removeprefix("width: ").removesuffix("%"))
    assert width == pytest.approx(min(100, 100 * share / 0.15), abs=0.06)


@pytest.mark.parametrize(
    ("share", "rows", "said"),
    [
        (0.12, 1.0, "1 row a step"),
        (0.07, 2.5, "2.5 rows a step"),
        (0.12, 8.0, ""),
        (0.04, 1.0, ""),
        (None, None, ""),
    ],
)
def test_an_alarm_is_explained_where_a_small_batch_is_the_reason(share, rows, said):
    why = readings.overhead_why({"overhead_share": share, "rows_per_step": rows})
    assert (said in why["overhead_why"]) and bool(why["overhead_why"]) == bool(said)
    assert ("nearly as much as thirty" in why["overhead_lesson"]) == bool(said)


def test_each_level_that_decided_is_named_with_its_share():
    shares = {"expert": 0.041, "precision": 0.0, "model": 0.0, "device": 0.012}
    assert readings.overhead_levels({"level_share": shares}) == "experts 4.1 %, devices 1.2 %"
    assert readings.overhead_levels({"level_share": {}}) == ""


def test_without_a_step_there_is_no_overhead():
    said = readings.overhead(None)
    assert said["overhead"] == readings.NOTHING and said["overhead_class"] == ""
