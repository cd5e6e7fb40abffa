"""Tables keep their laws, and the first placement spreads evenly."""

from __future__ import annotations

import numpy as np
import pytest

from engine.errors import RoutingError
from engine.routing.placement import assigned, contiguous
from engine.routing.table import RoutingTable


def replicated(**changes):
    """4 experts on 2 devices, 3 slots each; expert 1 has a copy on both."""
    fields = {
        "version": 3,
        "phy2log": [[0, 1, 2, 1, 3, 0]],
        "log2phy": [[[0, 5], [1, 3], [2, -1], [4, -1]]],
        "num_replicas": [[2, 2, 1, 1]],
        "rank_of_phy": [0, 0, 0, 1, 1, 1],
        "num_devices": 2,
    }
    return RoutingTable(**(fields | changes))


def test_contiguous_shares_differ_by_at_most_one():
    for experts, devices, shares in [
        (30, 8, [4, 4, 4, 4, 4, 4, 3, 3]),
        (5, 3, [2, 2, 1]),
        (2, 4, [1, 1, 0, 0]),
        (8, 1, [8]),
    ]:
        table = contiguous(2, experts, devices)
        assert np.bincount(table.rank_of_phy, minlength=devices).tolist() == shares
        assert table.is_identity


def test_the_small_table_of_the_docstring():
    table = contiguous(1, 4, 2)
    assert table.phy2log.tolist() == [[0, 1, 2, 3]]
    assert table.log2phy.tolist() == [[[0], [1], [2], [3]]]
    assert table.rank_of_phy.tolist() == [0, 0, 1, 1]


def test_tables_cannot_be_changed():
    table = contiguous(1, 4, 2)
    with pytest.raises(ValueError, match="read-only"):
        table.rank_of_phy[0] = 1
    with pytest.raises(AttributeError):
        table.version = 9


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"rank_of_phy": [0, 0, 0, 1, 1, 2]}, "device 2"),
        ({"rank_of_phy": [0, 0, 0, 1, 1]}, "one entry for each"),
        ({"log2phy": [[[0, 5], [1, 2], [2, -1], [4, -1]]]}, "another logical expert"),
        ({"log2phy": [[[0, 5], [1, 3], [2, 1], [4, -1]]]}, "-1 past"),
        ({"log2phy": [[[0, 9], [1, 3], [2, -1], [4, -1]]]}, "physical experts 0 to 5"),
        ({"num_replicas": [[0, 2, 1, 1]]}, "1 to 2 replicas"),
        ({"num_replicas": [[2, 2, 1]]}, "must agree"),
        ({"phy2log": [[0, 1, 2, 1, 3, 0, 4]], "rank_of_phy": [0] * 7}, "empty slot"),
        ({"phy2log": [[0, 1, 2, 1, 3, 0, -2]], "rank_of_phy": [0] * 7}, "empty slot"),
        ({"phy2log": [0, 1, 2, 1, 3, 0]}, "axes"),
        ({"log2phy": [[0, 1, 2, 4]]}, "axes"),
        ({"rank_of_phy": []}, "at least one"),
    ],
)
def test_a_table_that_breaks_a_law_is_refused(change, word):
    with pytest.raises(RoutingError, match=word):
        replicated(**change)


def test_the_hash_follows_version_and_contents():
    one, same = contiguous(2, 8, 4), contiguous(2, 8, 4)
    assert one.sha256() == same.sha256()
    assert one.sha256() != contiguous(2, 8, 4, version=1).sha256()
    moved = assigned(2, [0, 0, 1, 1, 2, 2, 3, 0], 4)
    assert one.sha256() != moved.sha256()
