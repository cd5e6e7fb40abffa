"""Tables of those that are left, and what ranks are for."""

from __future__ import annotations

import pytest

from engine.errors import RoutingError
from engine.routing.placement import assigned, contiguous
from engine.routing.survivors import Roles, levelled, without


def test_experts_of_a_rank_that_is_gone_go_to_the_least_loaded():
    table = assigned(1, [0, 0, 1, 1, 2, 2], 3)
    left = without(table, {0, 2})
    assert left.rank_of_phy.tolist() == [0, 0, 0, 2, 2, 2] and left.version == 1
    assert levelled(left, {0, 1, 2}).rank_of_phy.tolist() == [0, 0, 1, 2, 2, 1]
    with pytest.raises(RoutingError, match="no rank is left"):
        without(table, ())


def test_ranks_apart_do_their_own_work_until_one_kind_has_died_out():
    apart, together = Roles(2), Roles()
    assert apart.homes(range(4)) == [0, 1] and apart.holders(range(4)) == [2, 3]
    assert apart.homes([2, 3]) == [2, 3] and apart.holders([1]) == [1]
    assert together.homes([3, 1]) == together.holders([3, 1]) == [1, 3]
    assert contiguous(1, 3, 4, holders=apart.holders(range(4))).rank_of_phy.tolist() == [2, 2, 3]
