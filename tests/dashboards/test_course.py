"""The course of a drill's signals: what is kept, and where it is drawn."""

from __future__ import annotations

import re

import pytest

from dashboards.course import (
    GAP_S,
    HIGH,
    LEAST_S,
    MAX_POINTS,
    SHOWN_S,
    WIDE,
    Course,
    curve,
    in_words,
)


def state(at_s: float, sampled_s: float | None, **signals: float) -> dict:
    return {"elapsed_s": at_s, "sampled_s": sampled_s, "signals": signals}


def corners(path: str) -> list[tuple[str, float, float]]:
    return [(pen, float(x), float(y)) for pen, x, y in re.findall(r"([ML])([\d.]+) ([\d.]+)", path)]


def test_a_sample_is_kept_once_and_a_stale_one_adds_nothing():
    course = Course({"load": "busiest"})
    for at_s, sampled_s in ((1.2, 1.0), (1.9, 1.0), (2.3, 2.0), (9.0, 2.0)):
        course.take(state(at_s, sampled_s, busiest=1.5))
    assert course.points("load") == ((1.0, 1.5), (2.0, 1.5)) and course.now_s == 9.0
    assert course.points("other") == ()


def test_without_the_time_of_a_sample_other_values_are_a_new_one():
    course = Course({"load": "busiest"})
    for at_s, value in ((1.0, 1.5), (2.0, 1.5), (3.0, 1.6)):
        course.take({"elapsed_s": at_s, "signals": {"busiest": value}})
    assert course.points("load") == ((1.0, 1.5), (3.0, 1.6))


def test_what_was_asked_for_is_a_point_too_and_what_could_not_be_measured_is_none():
    course = Course({"load": "busiest", "answers": "kept"})
    course.take(state(4.0, None))
    found = [("load", 2.0), ("answers", 0.5), ("unknown", 1.0)]
    course.measured([{"name": name, "value": value} for name, value in found])
    course.measured([{"name": "load", "value": None}])
    assert course.points("load") == ((4.0, 2.0),) and course.points("answers") == ((4.0, 0.5),)


def test_it_is_bounded_however_long_a_drill_runs():
    course = Course({"load": "busiest"})
    for second in range(3 * MAX_POINTS):
        course.take(state(second, second, busiest=1.0))
    course.acted(float(second) for second in range(2 * MAX_POINTS))
    assert len(course.points("load")) == len(course.acts) == MAX_POINTS
    assert course.points("load")[-1][0] == 3 * MAX_POINTS - 1


def test_the_curve_begins_at_zero_and_lies_in_its_picture():
    drawn = curve([(0.0, 0.0), (30.0, 2.0), (31.0, 1.0)], [30.5], 31.0, (0.5, 1.5))
    (_, x0, y0), (pen, x1, y1), (_, x2, y2) = corners(drawn.line)
    assert pen == "M", "30 s without a sample are not bridged"
    assert x0 < x1 < x2 < WIDE and y1 < y2 < y0 <= HIGH
    assert (y0 - y2) / (y0 - y1) == pytest.approx(0.5, abs=0.01), "half the value, half as high"
    assert x2 / WIDE == pytest.approx(31 / LEAST_S, abs=0.03)
    top, height = drawn.band
    assert top < y2 < top + height, "1.0 lies in the band from 0.5 to 1.5"
    assert not top < y1 < top + height, "2.0 does not"
    assert drawn.newest.startswith(f"M{x2} {y2}") and drawn.acts.count("V") == 1


def test_only_the_newest_minutes_are_shown():
    points = [(float(second), 1.0) for second in range(900)]
    drawn = curve(points, [1.0, 899.0], 900.0, None)
    shown = corners(drawn.line)
    assert len(shown) == SHOWN_S and drawn.acts.count("M") == 1 and drawn.band == (0.0, 0.0)
    assert shown[0][1] < 3 and shown[-1][1] > WIDE - 3


def test_a_gap_of_a_few_seconds_is_bridged_and_a_longer_one_is_not():
    for gap, pens in ((GAP_S, "ML"), (GAP_S + 0.1, "MM")):
        line = curve([(0.0, 1.0), (gap, 1.0)], [], 10.0, None).line
        assert "".join(pen for pen, *_ in corners(line)) == pens


def test_nothing_and_all_zeros_can_be_drawn():
    assert curve([], [], 0.0, None).line == "" and curve([], [], 0.0, (0.0, 0.0)).newest == ""
    ((_, _, y),) = corners(curve([(1.0, 0.0)], [], 1.0, (0.0, 0.0)).line)
    assert y == pytest.approx(HIGH, abs=3)


def test_the_curve_in_words():
    assert in_words([], 9.0) == "no samples yet"
    assert in_words([(3.0, 1.0), (7.0, 2.5)], 9.0) == (
        "2 samples over the last 6 s, from 1 to 2.5, newest 2.5"
    )
