"""What the canary looks at, and when it calls two runs equal; with ranks see tests/cluster."""

from __future__ import annotations

import math

import numpy as np
import pytest

from engine.routing.placement import assigned, contiguous, filled
from engine.runtime.canary import MOST_STEPS, difference, moved_experts, steps_for


def test_only_experts_that_change_ranks_are_moved():
    now = assigned(1, [0, 0, 1, 1], 2)
    assert moved_experts(now, assigned(1, [0, 1, 1, 1], 2, version=1)) == [[1]]
    assert moved_experts(now, now) == [[]]
    # One more copy on the same rank moves nothing; one on another rank does.
    more = filled(np.array([[0, 1, 2, 3, 2, 3]]), np.array([0, 0, 1, 1, 0, 1]), 4, 2, version=1)
    assert moved_experts(now, more) == [[2]]


def test_moved_experts_are_dealt_into_steps_of_what_a_token_can_use():
    assert steps_for([[1, 4, 5], [2]], 2) == [[[1, 4], [2]], [[5], []]]
    assert steps_for([[], []], 2) == []
    assert len(steps_for([list(range(64))], 2)) == MOST_STEPS


def test_a_dense_models_table_has_nothing_to_look_at():
    now = contiguous(0, 1, 2)
    assert steps_for(moved_experts(now, now.moved([1])), 0) == []


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ([1.0, -4.0], [1.0, -4.0], 0.0),
        ([1.0, -4.0], [1.0, -3.0], 0.25),
        ([1.0, math.nan], [1.0, math.nan], 0.0),
        ([1.0, 2.0], [1.0, math.nan], math.inf),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
    ],
)
def test_differences_are_by_the_largest_logit_and_a_new_nan_is_the_worst(old, new, error):
    found = difference(np.array([old], np.float32), np.array([new], np.float32))
    assert found == pytest.approx(error)
