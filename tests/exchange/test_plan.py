"""Plans say what moves, what that gains, what it costs and when it has paid; or refuse."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ConfigError, RoutingError
from engine.exchange.plan import Move, moves_between, plan
from engine.exchange.topology import Topology
from engine.routing.balance import balanced, imbalance
from engine.routing.placement import contiguous, filled
from tests.exchange.test_topology import SMALL, raw

ONE_NODE = Topology.from_mapping(raw(num_ranks=4))
SKEWED = np.array([[90, 80, 10, 10, 10, 10, 10, 20]])
WORTH = {"expert_bytes": 10**6, "experts_us_per_step": 1000.0}


def two_ranks(phy2log, ranks, version=1):
    return filled(np.array(phy2log), np.array(ranks), 2, 2, version=version)


def test_the_move_of_the_docstring():
    now = two_ranks([[0, 1]], [0, 1])
    both = two_ranks([[0, 1, 0]], [0, 1, 1], version=2)
    assert moves_between(now, both, ONE_NODE) == (Move(0, 0, 0, 1),)
    assert moves_between(both, now, ONE_NODE) == (), "giving up a copy moves nothing"


def test_a_plan_adds_up_with_the_formulas_of_its_docstring():
    now = contiguous(1, 8, 4)  # busiest rank: 170 rows of 240
    made = plan(SKEWED, now, ONE_NODE, num_slots=8, **WORTH)
    assert made.imbalance_before == 170 / 60 and made.imbalance_after == 90 / 60 + 10 / 60
    assert made.gain == pytest.approx(1 - 100 / 170)
    assert made.saved_us_per_step == pytest.approx(1000 * (1 - 100 / 170))
    assert made.moved_bytes == len(made.moves) * 10**6
    assert made.payback_steps == math.ceil(made.transfer_us / made.saved_us_per_step)
    assert made.table.version == now.version + 1 and made.accepted() is made.table
    assert made.pays and f"{made.gain:.1%}" in made.reason
    assert made.bytes_per_rank == (2_000_000,) * 4 and made.replica_bytes == 0


def test_the_transfer_is_the_exchange_of_the_moves():
    now, new = two_ranks([[0, 1]], [0, 1]), two_ranks([[1, 0]], [0, 1], version=2)
    assert moves_between(now, new, ONE_NODE) == (Move(0, 0, 0, 1), Move(0, 1, 1, 0))
    load = np.array([[60, 60, 0, 0], [1, 1, 1, 1]])
    made = plan(load, contiguous(2, 4, 2), ONE_NODE, num_slots=4, **WORTH)
    assert len(made.moves) == 2 and {move.layer for move in made.moves} == {0}
    assert made.transfer_us == 8 + 2 + 10, "one expert each way, at the same time"


def test_only_layers_that_get_better_are_touched():
    load = np.array([[1, 1, 1, 1], [60, 60, 0, 0], [7, 1, 1, 7]])
    now = contiguous(3, 4, 2)
    made = plan(load, now, ONE_NODE, num_slots=4, **WORTH)
    assert {move.layer for move in made.moves} == {1}
    assert made.table.phy2log[[0, 2]].tolist() == now.phy2log[[0, 2]].tolist()


def test_a_layer_with_two_copies_on_a_rank_is_mended_even_without_gain():
    now = filled(np.array([[0, 0, 1, 1]]), np.array([0, 0, 1, 1]), 2, 2, version=1)
    made = plan(np.array([[5, 5]]), now, ONE_NODE, num_slots=4, **WORTH)
    assert sorted(made.table.phy2log[0, :2].tolist()) == [0, 1]


def test_replicas_are_counted_in_bytes():
    made = plan(SKEWED, contiguous(1, 8, 4), ONE_NODE, **WORTH)
    assert made.table.num_physical == 10
    assert made.replica_bytes == 2 * 10**6 and sum(made.bytes_per_rank) == 10 * 10**6
    assert made.imbalance_after < made.imbalance_before


def test_a_plan_that_pays_back_too_late_is_refused_in_words():
    slow = plan(
        SKEWED,
        contiguous(1, 8, 4),
        ONE_NODE,
        num_slots=8,
        horizon_steps=10,
        expert_bytes=10**9,
        experts_us_per_step=100.0,
    )
    assert not slow.pays and slow.payback_steps > 10
    with pytest.raises(RoutingError, match=r"refused: it saves 41.2%.*later than the 10 for which"):
        slow.accepted()


def test_the_border_of_paying_is_the_horizon():
    now = contiguous(1, 8, 4)
    steps = plan(SKEWED, now, ONE_NODE, num_slots=8, **WORTH).payback_steps
    assert plan(SKEWED, now, ONE_NODE, num_slots=8, horizon_steps=steps, **WORTH).pays
    assert not plan(SKEWED, now, ONE_NODE, num_slots=8, horizon_steps=steps - 1, **WORTH).pays


def test_a_load_that_is_even_already_moves_nothing_and_says_so():
    even = np.full((3, 8), 50)
    now = balanced(even, 4, version=4, num_slots=8)
    made = plan(even, now, ONE_NODE, num_slots=8, **WORTH)
    assert made.moves == () and made.transfer_us == 0 and made.payback_steps == math.inf
    with pytest.raises(RoutingError, match="moves no expert"):
        made.accepted()


def test_a_plan_that_saves_nothing_is_refused():
    made = plan(np.zeros((1, 8)), contiguous(1, 8, 4), ONE_NODE, **WORTH)
    assert made.gain == 0 and made.moves
    with pytest.raises(RoutingError, match=r"moves \d experts and saves no time"):
        made.accepted()


def test_an_expert_comes_from_its_own_node_where_a_rank_there_holds_it():
    slots, ranks = [[0, 1, 0, 1]], [0, 1, 4, 5]
    now = filled(np.array(slots), np.array(ranks), 2, 8, version=1)
    new = filled(np.array([[0, 1, 0, 1, 0]]), np.array([0, 1, 4, 5, 7]), 2, 8, version=2)
    assert moves_between(now, new, SMALL) == (Move(0, 0, 4, 7),)
    assert moves_between(now, new, SMALL, lost={4}) == (Move(0, 0, 0, 7),)
    assert moves_between(now, new, SMALL, lost={0, 4}) == (Move(0, 0, -1, 7),)


def test_holders_of_an_expert_take_turns_in_sending_it():
    now = filled(np.array([[0, 0, 1]]), np.array([0, 1, 0]), 2, 4, version=1)
    new = filled(np.array([[0, 0, 0, 0, 1]]), np.array([0, 1, 2, 3, 0]), 2, 4, version=2)
    assert moves_between(now, new, ONE_NODE) == (Move(0, 0, 0, 2), Move(0, 0, 1, 3))


@pytest.mark.parametrize("way", ["leaving", "lost"])
def test_a_rank_that_goes_is_emptied_whatever_that_costs(way):
    now = contiguous(2, 8, 4)
    load = np.ones((2, 8))
    made = plan(load, now, ONE_NODE, num_slots=8, horizon_steps=0, **WORTH, **{way: {1}})
    assert 1 not in made.table.rank_of_phy and made.pays and "rank 1 must" in made.reason
    brought = {(move.layer, move.expert) for move in made.moves if move.source in (1, -1)}
    assert brought == {(layer, expert) for layer in range(2) for expert in (2, 3)}
    sources = {move.source for move in made.moves if move.expert in (2, 3)}
    assert sources == ({1} if way == "leaving" else {-1})
    assert made.bytes_per_rank[1] == 0


def test_no_rank_left_and_too_small_a_topology_are_refused():
    with pytest.raises(RoutingError, match="name some of the ranks"):
        plan(SKEWED, contiguous(1, 8, 4), ONE_NODE, **WORTH, lost=range(4))
    with pytest.raises(ConfigError, match="1 to 4 processes, not 8"):
        plan(SKEWED, contiguous(1, 8, 8), ONE_NODE, **WORTH)


@st.composite
def situations(draw):
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    experts = draw(st.integers(1, 12))
    slots = draw(st.integers(experts, experts * 4))
    now = balanced(rng.pareto(1.0, (2, experts)), 8, version=1, num_slots=slots)
    lost = set(draw(st.lists(st.integers(0, 7), max_size=3)))
    leaving = set(draw(st.lists(st.integers(0, 7), max_size=1)))
    return rng.pareto(1.0, (2, experts)) * 100, now, slots, leaving, lost


@settings(deadline=None)
@given(situations())
def test_moves_carry_the_table_in_force_over_into_the_next(case):
    load, now, slots, leaving, lost = case
    made = plan(load, now, SMALL, num_slots=slots, leaving=leaving, lost=lost, **WORTH)
    gone = leaving | lost

    def held(table):
        return {
            (layer, int(expert), int(rank))
            for layer in range(table.num_layers)
            for expert, rank in zip(table.phy2log[layer], table.rank_of_phy, strict=True)
        }

    had, has = held(now), held(made.table)
    for move in made.moves:
        if move.source >= 0:
            assert (move.layer, move.expert, move.source) in had, "sent by one who lacks it"
            assert move.source not in lost
        assert (move.layer, move.expert, move.target) not in had, "moved to where it is"
    arrived = {(move.layer, move.expert, move.target) for move in made.moves}
    assert len(arrived) == len(made.moves) and has - had == arrived
    assert not {rank for _, _, rank in has} & gone
    assert made.imbalance_before == imbalance(load, now)
    assert made.gain <= 1 and made.transfer_us >= 0
    if not gone & set(now.rank_of_phy.tolist()):
        assert made.pays == (made.payback_steps <= 1000)
