"""What is said about numbers, and what a typed line asks for."""

from __future__ import annotations

import pytest

from workbench.demos.terminal import wanted
from workbench.demos.words import bounds, check_line, measured

CHECK = {
    "name": "German foreseen",
    "value": 0.714,
    "low": 0.0,
    "high": 0.88,
    "unit": "×",
    "seconds": 3.2,
}


def test_a_line_says_value_and_bounds():
    assert check_line(CHECK) == "German foreseen: 0.714 × (at most 0.88 ×), after 3 s"
    assert "not measured" in check_line({**CHECK, "value": None})


@pytest.mark.parametrize(
    ("low", "high", "unit", "words"),
    [
        (2, 2, "experts", "exactly 2 experts"),
        (0.95, 1, "share", "at least 95 %"),
        (0, 0.6, "share", "at most 60 %"),
        (0.999, 1.001, "", "0.999 to 1.001"),
        (5, 1e6, "rows/s", "at least 5 rows/s"),
    ],
)
def test_bounds_in_words(low, high, unit, words):
    assert bounds({"low": low, "high": high, "unit": unit}) == words


def test_shares_are_said_in_per_cent_and_nothing_as_a_dash():
    assert measured({**CHECK, "unit": "share"}) == "71.4 %"
    assert measured({**CHECK, "value": None}) == "–"


@pytest.mark.parametrize(
    ("line", "to"),
    [("", 2), ("n", 2), ("b", 0), ("7", 6), ("8", 1), ("x", 1), ("q", None), (None, None)],
)
def test_a_typed_line_asks_for_a_step(line, to):
    assert wanted(line, 1, 7) == to


def test_next_on_the_last_step_ends():
    assert wanted("", 6, 7) is None
