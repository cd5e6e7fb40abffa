"""Rows and bytes from home to device; replicas, changing tables and unknown places."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings

from engine.errors import ConfigError
from tests.views.handmade import Row, start, trace
from tests.views.test_load import FIVE, ROWS_OF_FIVE
from workbench import views

# Experts 0 1 live on device 0, experts 2 3 on device 1.
ROWS = [
    Row(0, 0, [(0, 1)], home=0),  # both at home: two pairs, one copy
    Row(0, 1, [(0, 3)], home=0),  # one at home, one crosses
    Row(1, 0, [(1, 0)], home=1),  # both cross: two pairs, one copy
]


def grid(table, column="rows"):
    return {
        (home, device): value
        for home, device, value in zip(table["home"], table["device"], table[column], strict=True)
    }


def test_pairs_and_copies_are_those_counted_by_hand():
    table = views.device_traffic(trace(ROWS))
    assert grid(table) == {(0, 0): 3, (0, 1): 1, (1, 0): 2, (1, 1): 0}
    assert grid(table, "tokens") == {(0, 0): 2, (0, 1): 1, (1, 0): 1, (1, 1): 0}
    assert grid(table, "crosses") == {(0, 0): 0, (0, 1): 1, (1, 0): 1, (1, 1): 0}


def test_bytes_are_rows_times_width_times_the_size_of_a_value_and_modelled():
    table = views.device_traffic(trace(ROWS), hidden_size=192)
    assert grid(table, "bytes")[0, 0] == 3 * 192 * 4
    half = views.device_traffic(trace(ROWS, begin=start(dtype="bfloat16")), hidden_size=192)
    assert grid(half, "bytes")[1, 0] == 2 * 192 * 2
    assert set(table["bytes_label"]) == {"modelled"} and set(table["label"]) == {"recorded"}
    assert views.device_traffic(trace(ROWS))["bytes"].isna().all()


def test_no_width_below_one_and_no_invented_label():
    with pytest.raises(ConfigError, match=r"hidden_size \(0\)"):
        views.device_traffic(trace(ROWS), hidden_size=0)
    with pytest.raises(ConfigError, match="'true'"):
        views.device_traffic(trace(ROWS), bytes_label="true")


def test_rows_that_ran_again_are_moved_again_unless_left_out():
    rows = [*ROWS, Row(0, 0, [(2, 3)], step=1, cause="preemption")]
    assert grid(views.device_traffic(trace(rows)))[0, 1] == 3
    assert grid(views.device_traffic(trace(rows), causes=views.ACCEPTED))[0, 1] == 1


def test_a_replica_counts_where_it_runs_not_where_the_original_lives():
    begin = start(rank_of_phy=(0, 0, 1, 1, 1))  # physical 4 is a copy of expert 0 on device 1
    rows = [Row(0, 0, [(0, 2)], phy=[(4, 2)], home=1)]
    assert grid(views.device_traffic(trace(rows, begin=begin)))[1, 1] == 2


def test_a_pair_without_an_expert_moves_nothing():
    assert views.device_traffic(trace([Row(0, 0, [(-1, -1)])]))["rows"].sum() == 0


CHANGED = [Row(0, 0, [(0, 2)], step=0), Row(0, 1, [(0, 2)], step=1)]


def test_each_version_places_its_own_rows():
    published = {2: (1, 1, 0, 0)}
    table = views.device_traffic(trace(CHANGED, versions={1: 2}, published=published))
    assert grid(table) == {(0, 0): 2, (0, 1): 2, (1, 0): 0, (1, 1): 0}
    moved = views.device_traffic(trace(CHANGED[1:], versions={1: 2}, published={2: (1, 1, 1, 1)}))
    assert grid(moved)[0, 1] == 2


def test_rows_under_a_table_nobody_knows_stand_under_device_minus_one():
    table = views.device_traffic(trace(CHANGED, versions={1: 2}))
    assert grid(table)[0, -1] == 2 and grid(table)[0, 0] == 1
    assert views.device_load(trace(CHANGED, versions={1: 2}))["rows"].tolist() == [1, 1]
    told = views.device_traffic(trace(CHANGED, versions={1: 2}), tables={2: (0, 0, 0, 0)})
    assert grid(told) == {(0, 0): 3, (0, 1): 1, (1, 0): 0, (1, 1): 0}


def test_an_id_or_a_rank_out_of_range_is_unknown_rather_than_wrong():
    outside = trace([Row(0, 0, [(0, 2)], phy=[(9, 2)])])
    assert grid(views.device_traffic(outside))[0, -1] == 1
    damaged = trace(CHANGED[:1], begin=start(rank_of_phy=(7, 0, 1, 1)))
    assert grid(views.device_traffic(damaged))[0, -1] == 1


def test_a_home_out_of_range_keeps_its_rows():
    table = views.device_traffic(trace([Row(0, 0, [(0, 2)], home=5)]))
    assert grid(table)[-1, 0] == 1 and grid(table)[-1, 1] == 1


def test_device_load_is_the_share_of_each_device_times_their_number():
    table = views.device_load(trace(ROWS))
    assert table["rows"].tolist() == [5, 1]
    assert table["load"].tolist() == pytest.approx([5 / 6 * 2, 1 / 6 * 2])
    idle = views.device_load(trace([Row(0, 0, [(0, 1)])]))
    assert idle["load"].tolist() == [2, 0]
    assert all(math.isnan(share) for share in views.device_load(trace([]))["share"])


@settings(max_examples=60, deadline=None)
@given(ROWS_OF_FIVE)
def test_every_pair_arrives_once_and_copies_agree_with_a_plain_loop(rows):
    device_of = (0, 0, 1, 1, 2)
    pairs, copies = {}, {}
    for row in rows:
        for layer, ids in zip((0, 3), row.ids, strict=True):
            there = [device_of[expert] for expert in ids if expert >= 0]
            for device in there:
                at = (layer, row.home, device)
                pairs[at] = pairs.get(at, 0) + 1
            for device in set(there):
                at = (layer, row.home, device)
                copies[at] = copies.get(at, 0) + 1
    table = views.device_traffic(trace(rows, begin=FIVE)).set_index(["layer", "home", "device"])
    assert {at: n for at, n in table["rows"].items() if n} == pairs
    assert {at: n for at, n in table["tokens"].items() if n} == copies
