"""Plans: every expert somewhere, at most one copy on a device, and rows spread evenly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import RoutingError
from engine.routing.placement import contiguous, filled, replicated


def test_the_examples_hold():
    table = filled(np.array([[0, 1, 0]]), np.array([0, 0, 1]), 2, 2, version=1)
    assert table.log2phy.tolist() == [[[0, 2], [1, -1]]]
    assert table.num_replicas.tolist() == [[2, 1]]
    assert replicated(np.array([[6, 1, 1, 0]]), 2, version=1).phy2log.tolist() == [
        [0, 1, 2, 0, 1, 3]
    ]


def test_filling_the_slots_of_a_table_gives_the_table_again():
    table = contiguous(3, 8, 4, version=2)
    again = filled(table.phy2log, table.rank_of_phy, 8, 4, version=2)
    assert again.sha256() == table.sha256()


@st.composite
def loads(draw):
    experts, devices = draw(st.integers(1, 40)), draw(st.integers(1, 9))
    seed = draw(st.integers(0, 10**6))
    spare = draw(st.integers(0, experts - -(-experts // devices)))
    skewed = np.random.default_rng(seed).pareto(1.0, (2, experts)) * 50
    return skewed.astype(np.int64), devices, spare


@given(loads())
def test_every_plan_is_valid_whatever_the_load(case):
    load_LE, devices, spare = case
    table = replicated(load_LE, devices, version=1, spare=spare)
    room = -(-load_LE.shape[1] // devices) + spare
    assert np.bincount(table.rank_of_phy, minlength=devices).tolist() == [room] * devices
    for layer in range(2):
        for device in range(devices):
            held = table.phy2log[layer, table.rank_of_phy == device]
            assert len(set(held.tolist())) == room, "two copies of one expert on a device"


def test_a_hot_expert_gets_a_copy_on_every_device_and_the_load_becomes_even():
    load_LE = np.array([[10, 10, 10, 900, 10, 10, 10, 10]])
    table = replicated(load_LE, 4, version=1)
    assert table.num_replicas[0].tolist()[3] == 4

    def busiest(table):
        rows = np.zeros(4)
        for expert, load in enumerate(load_LE[0]):
            copies = table.num_replicas[0, expert]
            for slot in table.log2phy[0, expert, :copies]:
                rows[table.rank_of_phy[slot]] += load / copies
        return rows.max() / rows.mean()

    assert busiest(contiguous(1, 8, 4)) > 3.5
    assert busiest(table) < 1.05


@pytest.mark.parametrize("spare", [-1, 7])
def test_room_for_two_copies_of_one_expert_is_refused(spare):
    with pytest.raises(RoutingError, match=r"spare \(.*between 0 and 6"):
        replicated(np.ones((1, 8), dtype=np.int64), 4, version=1, spare=spare)
