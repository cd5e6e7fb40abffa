"""Ranking by keys: any numbers, ties and classes give the order that a plain sort gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.rank import best_by_keys, sum_of_best_two

FLOATS = st.floats(allow_nan=False, width=32)


def plainly(rows, count, classes):
    return [
        sorted(range(len(row)), key=lambda at: (-classes[at], -row[at], at))[:count] for row in rows
    ]


def test_the_rows_of_the_docstring_are_ranked_as_it_says():
    rows = np.array([[1, 3, 3, 0]], dtype=np.float32)
    assert best_by_keys(rows, 2).tolist() == [[1, 2]]
    assert best_by_keys(rows, 2, np.array([1, 0, 0, 0])).tolist() == [[0, 1]]


@given(data=st.data())
def test_any_finite_or_infinite_numbers_are_ranked_by_class_number_and_place(data):
    width = data.draw(st.integers(1, 90))
    row = st.lists(FLOATS | st.sampled_from([0.0, -0.0, 1.0]), min_size=width, max_size=width)
    rows = data.draw(st.lists(row, min_size=0, max_size=4))
    classed = data.draw(st.booleans())
    classes = data.draw(st.lists(st.integers(-1, 1), min_size=width, max_size=width))
    count = data.draw(st.integers(1, width))
    order = np.array(rows, dtype=np.float32).reshape(len(rows), width)
    found = best_by_keys(order, count, np.array(classes) if classed else None)
    assert found.tolist() == plainly(order.tolist(), count, classes if classed else [0] * width)


@pytest.mark.parametrize("width", [64, 100, 256, 511])
def test_short_lists_hold_where_numbers_differ_in_their_last_bits_only(width):
    """Numbers one step of fp32 apart fall together in a half key, so the rows are ranked whole."""
    random = np.random.default_rng(0)
    steps = random.permuted(np.tile(np.arange(width), (6, 1)), axis=1).astype(np.int32)
    near_one = (np.int32(0x3F800000) + steps).view(np.float32)
    few = np.where(steps < 4, near_one, np.float32(0.5))
    for order in (near_one, -near_one, few, np.zeros_like(few)):
        for count in (1, 4, 8):
            found = best_by_keys(order, count).tolist()
            assert found == plainly(order.tolist(), count, [0] * width)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("infinite", [1, 2, 30])
def test_infinite_numbers_keep_their_places_in_a_long_row(infinite, count):
    order = np.zeros((5, 96), dtype=np.float32)
    order[:, 96 - infinite :] = np.inf
    order[1:3, 50], order[3, :40] = np.finfo(np.float32).max, -np.inf
    order[4] = -order[4]
    assert best_by_keys(order, count).tolist() == plainly(order.tolist(), count, [0] * 96)


def test_a_rank_that_breaks_ties_upwards_or_drops_the_last_bits_is_seen():
    row = [[1.0, 1.0 + 2**-20, 1.0, 0.0]]
    assert plainly(row, 3, [0] * 4) == [[1, 0, 2]]
    assert best_by_keys(np.array(row, dtype=np.float32), 3).tolist() == [[1, 0, 2]]
    assert best_by_keys(np.array(row, dtype=np.float16).astype(np.float32), 3).tolist() != [
        [1, 0, 2]
    ]


@given(st.lists(st.floats(-9, 9, width=32), min_size=2, max_size=9))
def test_the_two_best_are_summed_also_where_they_are_equal(numbers):
    expected = np.float32(sum(sorted(np.array(numbers, dtype=np.float32))[-2:]))
    assert sum_of_best_two(torch.tensor([[numbers]])).tolist() == [[float(expected)]]
