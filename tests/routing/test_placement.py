"""Tables made from slots, and the smallest placements."""

from __future__ import annotations

import numpy as np
import pytest

from engine.errors import RoutingError
from engine.routing.placement import assigned, contiguous, even_shares, filled


def test_the_examples_hold():
    table = filled(np.array([[0, 1, 0]]), np.array([0, 0, 1]), 2, 2, version=1)
    assert table.log2phy.tolist() == [[[0, 2], [1, -1]]]
    assert table.num_replicas.tolist() == [[2, 1]]
    assert even_shares(30, 8) == [4, 4, 4, 4, 4, 4, 3, 3]


def test_filling_the_slots_of_a_table_gives_the_table_again():
    table = contiguous(3, 8, 4, version=2)
    again = filled(table.phy2log, table.rank_of_phy, 8, 4, version=2)
    assert again.sha256() == table.sha256()


def test_a_table_without_experts_or_with_an_expert_nowhere_is_refused():
    with pytest.raises(RoutingError, match="at least one expert"):
        assigned(1, [], 2)
    with pytest.raises(RoutingError, match="every expert needs 1 to 2 replicas, found 0"):
        filled(np.array([[0, 0, 2]]), np.array([0, 1, 1]), 3, 2, version=1)
