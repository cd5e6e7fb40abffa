"""Balanced placements: the public worked example, the laws every plan keeps, and what stays put."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import RoutingError
from engine.routing.balance import (
    balanced,
    default_slots,
    imbalance,
    is_hierarchical,
    rank_rows,
    replicated,
)
from engine.routing.placement import assigned, contiguous, filled

WORKED_LOAD = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
)
TWO_NODES = [range(4), range(4, 8)]


def check_laws(table, num_experts):
    """Every expert somewhere, no rank with two copies of one, every entry of the maps right."""
    for layer in range(table.num_layers):
        held = table.phy2log[layer]
        assert set(held.tolist()) == set(range(num_experts)), "an expert is nowhere"
        for rank in range(table.num_devices):
            on_rank = held[table.rank_of_phy == rank].tolist()
            assert len(set(on_rank)) == len(on_rank), f"two copies on rank {rank}"
        for expert in range(num_experts):
            copies = table.num_replicas[layer, expert]
            assert copies == (held == expert).sum()
            slots = table.log2phy[layer, expert]
            assert sorted(slots[:copies].tolist()) == np.flatnonzero(held == expert).tolist()
            assert (slots[copies:] == -1).all()


def shares(table):
    return np.bincount(table.rank_of_phy, minlength=table.num_devices).tolist()


def test_the_public_worked_example_of_eplb_comes_out_exactly():
    table = balanced(WORKED_LOAD, 8, version=1, num_slots=16, nodes=TWO_NODES, num_groups=4)
    assert table.phy2log.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    check_laws(table, 12)
    assert imbalance(WORKED_LOAD, table) < imbalance(WORKED_LOAD, contiguous(2, 12, 8))


def test_the_small_examples_of_the_docstrings_hold():
    load = np.array([[6, 1, 1, 0]])
    table = balanced(load, 2, version=1, num_slots=6)
    assert table.phy2log.tolist() == [[0, 2, 1, 0, 1, 3]]
    assert rank_rows(load, table).tolist() == [[4.5, 3.5]]
    assert imbalance(load, table) == 4.5 / 4
    assert default_slots(8, 4) == 10 and default_slots(8, 1) == 8
    assert balanced(np.array([[90, 30, 20]]), 3, version=1, num_slots=5).num_replicas.tolist() == [
        [3, 1, 1]
    ]


def test_loads_100_1_1_1_on_two_ranks_of_three_slots_make_a_valid_plan():
    table = balanced(np.array([[100, 1, 1, 1]]), 2, version=1, num_slots=6)
    check_laws(table, 4)
    assert shares(table) == [3, 3]


@pytest.mark.parametrize("seed", range(3))
def test_256_experts_with_32_spare_slots_on_32_ranks_make_valid_plans(seed):
    load = np.random.default_rng(seed).pareto(1.0, (2, 256)) * 100
    table = balanced(load, 32, version=1, num_slots=288)
    check_laws(table, 256)
    assert shares(table) == [9] * 32
    assert imbalance(load, table) < imbalance(load, contiguous(2, 256, 32)) / 1.5


@pytest.mark.parametrize(
    ("experts", "ranks", "expected"),
    [
        (30, 8, [4, 4, 4, 4, 4, 4, 3, 3]),
        (5, 3, [2, 2, 1]),
        (2, 4, [1, 1, 0, 0]),
        (1, 1, [1]),
    ],
)
def test_shares_that_do_not_divide_differ_by_at_most_one(experts, ranks, expected):
    load = np.random.default_rng(1).pareto(1.0, (2, experts))
    table = balanced(load, ranks, version=1, num_slots=experts)
    assert shares(table) == expected
    check_laws(table, experts)


@st.composite
def cases(draw):
    """A load, ranks in nodes of any size with some ranks left out, and slots that fit."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    ranks = iter(draw(st.permutations(range(sum(sizes) + draw(st.integers(0, 2))))))
    nodes = [[next(ranks) for _ in range(size)] for size in sizes]
    num_ranks = sum(sizes) + len(list(ranks))
    groups = draw(st.integers(1, 6))
    experts = groups * draw(st.integers(1, 5))
    reach = sizes[0] if is_hierarchical(experts, groups, nodes) else sum(sizes)
    slots = draw(st.integers(experts, experts * reach))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    load = rng.pareto(draw(st.sampled_from([0.5, 1.0, 4.0])), (2, experts)) * 50
    if draw(st.booleans()):
        load = load.astype(np.int64)  # ties and zeros
    return load, num_ranks, nodes, groups, slots, rng


@settings(deadline=None)
@given(cases())
def test_every_plan_keeps_the_laws_whatever_the_load_and_the_nodes(case):
    load, num_ranks, nodes, groups, slots, rng = case
    table = balanced(load, num_ranks, version=1, num_slots=slots, nodes=nodes, num_groups=groups)
    check_laws(table, load.shape[1])
    used = list(chain(*nodes))
    on_used = np.array(shares(table))[used]
    assert on_used.sum() == slots, "a rank that was left out got an expert"
    assert on_used.max() - on_used.min() <= (1 if len(nodes) == 1 else 2)
    if is_hierarchical(load.shape[1], groups, nodes) and len(nodes) > 1:
        check_groups_stay_together(table, nodes, groups)


@settings(deadline=None)
@given(cases())
def test_a_plan_that_knows_the_table_in_force_balances_as_well_and_moves_no_more(case):
    load, num_ranks, nodes, groups, slots, rng = case
    settings = {"num_slots": slots, "nodes": nodes, "num_groups": groups}
    now = balanced(load, num_ranks, version=1, **settings)
    later = load * rng.uniform(0.5, 2.0, load.shape)
    fresh = balanced(later, num_ranks, version=2, **settings)
    kept = balanced(later, num_ranks, version=2, now=now, **settings)
    check_laws(kept, load.shape[1])
    assert imbalance(later, kept) == pytest.approx(imbalance(later, fresh))
    again = balanced(load, num_ranks, version=2, now=now, **settings)
    assert again.phy2log.tolist() == now.phy2log.tolist(), "the same load moved an expert"


def check_groups_stay_together(table, nodes, groups):
    size = table.num_experts // groups
    for layer in range(table.num_layers):
        for node in nodes:
            on_node = table.phy2log[layer, np.isin(table.rank_of_phy, list(node))]
            found = {expert // size for expert in on_node.tolist()}
            assert len(found) == groups // len(nodes), "a group is spread over nodes"


def arrivals(now, new):
    """Return how many experts come to a rank that did not hold them."""
    count = 0
    for layer in range(now.num_layers):
        for rank in range(now.num_devices):
            was = set(now.phy2log[layer, now.rank_of_phy == rank].tolist())
            count += len(set(new.phy2log[layer, new.rank_of_phy == rank].tolist()) - was)
    return count


def test_a_small_shift_of_load_moves_few_experts_when_the_table_in_force_is_known():
    rng = np.random.default_rng(5)
    load = rng.pareto(1.0, (4, 64)) * 100
    now = balanced(load, 8, version=1)
    later = load * rng.uniform(0.95, 1.05, load.shape)
    fresh = balanced(later, 8, version=2)
    kept = balanced(later, 8, version=2, now=now)
    assert arrivals(now, kept) < arrivals(now, fresh)
    stays = (kept.phy2log == now.phy2log).mean()
    assert stays > (fresh.phy2log == now.phy2log).mean()


def test_experts_that_stay_on_a_rank_keep_their_slots():
    now = filled(np.array([[1, 2, 3, 0]]), np.array([0, 0, 1, 1]), 4, 2, version=1)
    new = balanced(np.array([[9, 8, 1, 0]]), 2, version=2, num_slots=4, now=now)
    for slot, (was, holds) in enumerate(zip(now.phy2log[0], new.phy2log[0], strict=True)):
        rank = now.rank_of_phy[slot]
        if was in new.phy2log[0, new.rank_of_phy == rank]:
            assert holds == was


@pytest.mark.parametrize("experts", [1, 4, 5, 8, 64, 97])
def test_by_default_only_the_hottest_fifth_has_replicas(experts):
    load = np.random.default_rng(experts).pareto(0.8, (3, experts)) + 0.01
    table = balanced(load, 4, version=1)
    hottest = np.ceil(0.2 * experts)
    assert table.num_physical == min(experts + hottest, 4 * experts)
    for layer in range(3):
        busier = (load[layer][:, None] < load[layer]).sum(axis=1)
        assert (busier[table.num_replicas[layer] > 1] < hottest).all()


def test_groups_that_do_not_divide_over_nodes_are_balanced_globally():
    free = balanced(WORKED_LOAD, 8, version=1, num_slots=16)
    uneven = [range(4), range(4, 7)]
    assert not is_hierarchical(12, 3, TWO_NODES) and not is_hierarchical(12, 4, uneven)
    table = balanced(WORKED_LOAD, 8, version=1, num_slots=16, nodes=TWO_NODES, num_groups=3)
    assert table.phy2log.tolist() == free.phy2log.tolist()
    check_laws(balanced(WORKED_LOAD, 8, version=1, nodes=uneven, num_groups=4), 12)


def test_a_layer_without_rows_spreads_its_copies_over_different_experts():
    table = balanced(np.zeros((1, 8), dtype=np.int64), 4, version=1, num_slots=12)
    check_laws(table, 8)
    assert table.num_replicas.max() == 2
    assert imbalance(np.zeros((1, 8)), table) == 1.0


def test_a_hot_expert_gets_a_copy_on_every_rank_and_the_load_becomes_even():
    load = np.array([[10, 10, 10, 900, 10, 10, 10, 10]])
    table = replicated(load, 4, version=1)
    assert table.num_replicas[0, 3] == 4
    assert imbalance(load, contiguous(1, 8, 4)) > 3.5
    assert imbalance(load, table) < 1.05


def test_imbalance_adds_layers_up_and_leaves_out_ranks_without_experts():
    load = np.array([[8, 0], [1, 1]])
    table = assigned(2, [0, 1], 4)
    assert rank_rows(load, table).tolist() == [[8, 0, 0, 0], [1, 1, 0, 0]]
    assert imbalance(load, table) == (8 + 1) / (4 + 1)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_slots": 7}, r"num_slots \(7\) must lie between 8.*and 32"),
        ({"num_slots": 33}, r"num_slots \(33\) must lie between 8.*and 32"),
        ({"num_groups": 3}, r"num_groups \(3\) must be a divisor of the 8"),
        ({"nodes": [[0, 1], [1, 2]]}, "each at most once"),
        ({"nodes": [[0, 4]]}, "ranks 0 to 3"),
        ({"nodes": [[]]}, "some of the ranks"),
        ({"load_LE": np.full((1, 8), np.nan)}, "0 or more for every expert"),
        ({"load_LE": np.full((1, 8), -1)}, "0 or more for every expert"),
    ],
)
def test_plans_that_cannot_be_are_refused(changes, sentence):
    arguments = {"load_LE": np.ones((1, 8)), "num_ranks": 4, "version": 1} | changes
    with pytest.raises(RoutingError, match=sentence):
        balanced(**arguments)


@pytest.mark.parametrize("spare", [-1, 7])
def test_room_for_two_copies_of_one_expert_is_refused(spare):
    with pytest.raises(RoutingError, match=r"spare \(.*between 0 and 6"):
        replicated(np.ones((1, 8), dtype=np.int64), 4, version=1, spare=spare)


# --- negative controls: the laws see each kind of wrong plan --------------------------------------


@pytest.mark.parametrize(
    ("phy2log", "word"),
    [
        ([[0, 0, 1, 2, 3, 1]], "two copies on rank 0"),
        ([[0, 1, 2, 0, 1, 2]], "nowhere"),
    ],
)
def test_the_laws_notice_a_wrong_plan(phy2log, word):
    ranks = np.array([0, 0, 0, 1, 1, 1])
    with pytest.raises((AssertionError, RoutingError), match=f"{word}|found 0"):
        check_laws(filled(np.array(phy2log), ranks, 4, 2, version=1), 4)
