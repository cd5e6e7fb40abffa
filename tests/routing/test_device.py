"""Rows run at home first, and no replica runs more than a fair share in whole tiles."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.routing import device_rows
from engine.routing.balance import balanced, imbalance
from engine.routing.device import AWAY, FULL, HOME, ONLY, TILE_ROWS, Placer, _dealt
from engine.routing.placement import contiguous, filled
from tests.routing.test_table import replicated


def place(ids, homes, table, layer=0, rows=None):
    placed = Placer().place(torch.tensor(ids), torch.tensor(homes), table, layer, rows)
    assert placed.dtype == torch.int64
    return placed


def everywhere(experts, devices):
    """Return a table in which every device holds every expert."""
    slots = np.tile(np.arange(experts), (1, devices))
    return filled(slots, np.repeat(np.arange(devices), experts), experts, devices, version=1)


def test_tokens_use_the_replica_on_their_own_device():
    table = replicated()
    assert place([[0, 1], [0, 1], [2, 3]], [0, 1, 1], table).tolist() == [[0, 1], [5, 3], [2, 4]]


def test_the_example_of_the_docstring_keeps_two_tiles_and_sends_the_rest():
    placed = place([[0]] * 50, [0] * 48 + [1] * 2, replicated()).flatten().tolist()
    assert placed == [0] * 32 + [5] * 18


def test_a_device_that_brings_everything_does_not_starve_the_other_replicas():
    placed = place([[0]] * 128, [2] * 128, everywhere(4, 4)) // 4  # the device, as each holds 4
    assert np.bincount(placed.flatten(), minlength=4).tolist() == [32, 32, 32, 32]
    assert placed.flatten().tolist()[:32] == [2] * 32, "the first rows stay at home"


def test_few_rows_stay_at_home_for_they_fit_into_one_tile():
    placed = place([[0]] * 17, [2] * 16 + [3], everywhere(4, 4)) // 4
    assert placed.flatten().tolist() == [2] * 16 + [3]
    placed = place([[0]] * 17, [2] * 17, everywhere(4, 4)) // 4
    assert placed.flatten().tolist()[:16] == [2] * 16 and placed[16] != 2


def test_room_is_filled_in_proportion_and_rounding_goes_round():
    room, rows = np.array([[2, 0, 2]] * 3), np.array([[3]] * 3)
    edges = _dealt(room, rows, np.array([[0], [2], [4]]))
    assert edges.tolist() == [[1, 1, 3], [2, 2, 3], [1, 1, 3]]


def test_every_row_stays_at_home_when_homes_are_even():
    homes = [device for device in range(4) for _ in range(6)]
    placed = place([[e] for _ in range(4) for e in (0, 1, 1, 2, 3, 3)], homes, everywhere(4, 4))
    assert (placed.flatten() // 4).tolist() == homes


def test_single_rows_of_many_experts_do_not_all_go_to_the_first_replica():
    table = filled(np.tile(np.arange(16), (4, 2)), np.repeat([0, 1], 16), 16, 3, version=1)
    for layer in range(4):
        placed = place([[e] for e in range(16)], [2] * 16, table, layer)
        assert np.bincount(table.rank_of_phy[placed.flatten()]).tolist() == [8, 8]


def test_a_single_row_stays_at_home_whichever_replica_is_there():
    for home in range(4):
        for expert in range(4):
            placed = place([[expert]], [home], everywhere(4, 4))
            assert placed.item() == home * 4 + expert


def test_two_replicas_on_one_device_share_too():
    table = replicated(rank_of_phy=[0, 0, 0, 0, 1, 0])
    assert sorted(place([[1]] * 2, [1] * 2, table).flatten().tolist()) == [1, 3]
    assert np.bincount(place([[1]] * 64, [0] * 64, table).flatten()).tolist() == [0, 32, 0, 32]


def test_without_replicas_the_only_copy_is_looked_up():
    table = filled(np.array([[3, 0, 1, 2]]), np.array([0, 0, 1, 1]), 4, 2, version=1)
    assert place([[0, 1], [2, 3]], [0, 1], table).tolist() == [[1, 2], [3, 0]]
    ids = torch.tensor([[0, 1]])
    assert Placer().place(ids, torch.tensor([0]), contiguous(1, 4, 2), 0) is ids


def test_no_tokens_are_placed_nowhere():
    empty = torch.empty(0, 2, dtype=torch.int64)
    placed = Placer().place(empty, torch.empty(0, dtype=torch.int64), replicated(), 0)
    assert placed.shape == (0, 2) and placed.dtype == torch.int64


@st.composite
def steps(draw):
    """A table with replicas and the rows of one step."""
    devices, experts = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    slots = draw(st.integers(experts, experts * devices))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    load = rng.pareto(1.0, (2, experts))
    table = balanced(load, devices, version=1, num_slots=slots)
    tokens, k = draw(st.integers(0, 200)), draw(st.integers(1, experts))
    scores = load[1] * rng.random((tokens, experts))
    ids = np.argsort(-scores, axis=1)[:, :k].astype(np.int64)
    homes = rng.choice(devices, tokens, p=rng.dirichlet(np.ones(devices)))
    return table, ids, homes.astype(np.int64)


def rows_of(table, layer, ids, homes, placed):
    """Check that ids fit, and return rows by (home, physical expert)."""
    assert (table.phy2log[layer][placed] == ids).all(), "a row went to another expert"
    rows = np.zeros((table.num_devices, table.num_physical), dtype=np.int64)
    np.add.at(rows, (np.repeat(homes, ids.shape[1]), placed.ravel()), 1)
    return rows


@settings(deadline=None)
@given(steps())
def test_rows_stay_at_home_up_to_a_share_in_whole_tiles_and_no_replica_runs_more(case):
    table, ids, homes = case
    placed = Placer().place(torch.from_numpy(ids), torch.from_numpy(homes), table, 1).numpy()
    rows = rows_of(table, 1, ids, homes, placed)
    for expert in range(table.num_experts):
        slots = table.log2phy[1, expert, : table.num_replicas[1, expert]]
        served, at = rows[:, slots].sum(axis=0), table.rank_of_phy[slots]
        share = -(-int(served.sum()) // len(slots))
        limit = -(-share // TILE_ROWS) * TILE_ROWS
        at_home = np.array([((ids == expert).any(axis=1) & (homes == rank)).sum() for rank in at])
        kept = np.minimum(at_home, limit)
        if len(slots) > 1:
            assert rows[at, slots].tolist() == kept.tolist()
            assert (served <= np.maximum(kept, share)).all(), "a replica runs more than its share"
        if not at_home.any():
            assert served.max() - served.min() <= 1


@settings(deadline=None)
@given(steps())
def test_devices_that_place_their_own_rows_agree_with_one_that_places_all(case):
    table, ids, homes = case
    together = Placer().place(torch.from_numpy(ids), torch.from_numpy(homes), table, 1)
    rows_GE = np.zeros((table.num_devices, table.num_experts), dtype=np.int64)
    np.add.at(rows_GE, (np.repeat(homes, ids.shape[1]), ids.ravel()), 1)
    for device in range(table.num_devices):
        mine = torch.from_numpy(homes == device)
        alone = Placer().place(
            torch.from_numpy(ids)[mine],
            torch.from_numpy(homes)[mine],
            table,
            1,
            torch.from_numpy(rows_GE),
        )
        assert torch.equal(alone, together[mine])


@settings(deadline=None)
@given(steps(), st.booleans())
def test_a_loop_over_rows_and_arrays_share_them_alike_and_for_the_same_reasons(case, told):
    table, ids, homes = case
    rows_GE = np.zeros((table.num_devices, table.num_experts), dtype=np.int64)
    np.add.at(rows_GE, (np.repeat(homes, ids.shape[1]), ids.ravel()), 3 if told else 1)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for most in (0, 1 << 30):
            patch.setattr(device_rows, "MOST_WORK", most)
            placer = Placer()
            rows = torch.from_numpy(rows_GE) if told else None
            homes_T = torch.from_numpy(homes)
            placed = placer.place(torch.from_numpy(ids), homes_T, table, 1, rows)
            found.append((placed, placer.last.why_TK))
    (arrays, why_arrays), (loop, why_loop) = found
    assert torch.equal(arrays, loop) and arrays.dtype == loop.dtype
    assert (why_arrays is None) == (why_loop is None)
    assert why_arrays is None or torch.equal(why_arrays, why_loop)


def max_over_mean(rows_P, table):
    on_rank = np.bincount(table.rank_of_phy, weights=rows_P, minlength=table.num_devices)
    return on_rank.max() / on_rank.mean()


def always_home_first(ids, homes, table):
    """Return the rule that starves: the own device's replica takes all, else one by number."""
    placed = np.empty_like(ids)
    for place_, (expert, home) in enumerate(
        zip(ids.ravel(), np.repeat(homes, ids.shape[1]), strict=True)
    ):
        slots = table.log2phy[0, expert, : table.num_replicas[0, expert]]
        own = slots[table.rank_of_phy[slots] == home]
        placed.flat[place_] = own[0] if len(own) else slots[home % len(slots)]
    return placed


@pytest.mark.parametrize("homes_of", ["even", "one", "skewed"])
def test_skewed_loads_are_as_even_as_planned_wherever_the_tokens_live(homes_of):
    rng = np.random.default_rng(7)
    popularity = 1.0 / np.arange(1, 65) ** 1.1
    scores = np.log(popularity) + rng.gumbel(size=(4096, 64))  # K draws without replacement
    ids = np.argsort(-scores, axis=1)[:, :4].astype(np.int64)
    homes = {
        "even": np.arange(4096) % 8,
        "one": np.zeros(4096, dtype=np.int64),
        "skewed": rng.choice(8, 4096, p=[0.5, 0.2, 0.1, 0.1, 0.05, 0.03, 0.02, 0.0]),
    }[homes_of]
    load = np.bincount(ids.ravel(), minlength=64)[None]
    table = balanced(load, 8, version=1)
    planned = imbalance(load, table)
    placed = Placer().place(torch.from_numpy(ids), torch.from_numpy(homes), table, 0).numpy()
    rows = rows_of(table, 0, ids, homes, placed)
    ours = max_over_mean(rows.sum(axis=0), table)
    assert ours < planned + 0.06  # the begun tiles of each replicated expert
    local = rows[table.rank_of_phy, np.arange(table.num_physical)].sum() / rows.sum()
    starving = rows_of(table, 0, ids, homes, always_home_first(ids, homes, table))
    if homes_of == "even":
        assert local > 1.15 / 8, "replicas at home must be used more often than by chance"
    else:
        assert max_over_mean(starving.sum(axis=0), table) > 1.5 > ours


def why(ids, homes, table):
    placer = Placer()
    placer.place(torch.tensor(ids), torch.tensor(homes), table, 0)
    return placer.last.why_TK.tolist()


def test_the_placement_notes_why_it_took_each_replica():
    table = replicated()
    assert why([[2, 0]], [0], table) == [[ONLY, HOME]]
    assert (
        why([[0]] * 50, [0] * 48 + [1] * 2, table) == [[HOME]] * 32 + [[FULL]] * 16 + [[HOME]] * 2
    )
    elsewhere = filled(np.array([[0, 1, 0]]), np.array([0, 1, 1]), 2, 3, version=1)
    assert why([[0, 1]], [2], elsewhere) == [[AWAY, ONLY]]
    placer = Placer()
    placer.place(torch.tensor([[0]]), torch.tensor([0]), contiguous(1, 4, 2), 0)
    assert placer.last.why_TK is None, "no expert has replicas"


def test_reasons_say_what_the_placement_did():
    assert Placer.reason(ONLY, 0, 1, 1) == "the only copy, on device 0"
    assert "own device 1" in Placer.reason(HOME, 1, 1, 2)
    assert Placer.reason(FULL, 1, 0, 2) == (
        "one of 2 copies; the one on the token's own device 0 had its share of rows, so device 1"
    )
    assert "none of 2 copies on device 2; spread to device 1" == Placer.reason(AWAY, 1, 2, 2)


def test_what_was_placed_before_is_looked_up_and_the_same():
    placer, table = Placer(), replicated()
    ids, homes = torch.tensor([[0, 1]]), torch.tensor([1])
    first = placer.place(ids, homes, table, 0)
    assert not placer.found
    again = placer.place(ids.clone(), homes.clone(), table, 0)
    assert placer.found and torch.equal(again, first) and placer.look_ups.hits == 1
    assert placer.place(ids, torch.tensor([0]), table, 0).tolist() == [[0, 1]]
    assert not placer.found, "another home is another question"
    placer.place(ids, homes, replicated(), 0)
    assert not placer.found, "another table forgets what the last one said"
    placer.place(torch.cat([ids] * 5), torch.cat([homes] * 5), table, 0)
    assert placer.look_ups.misses == 3, "with so many rows nothing is looked up"


# --- negative controls: the laws see each kind of wrong placement ---------------------------------


def test_the_checks_notice_a_row_at_another_expert_and_a_starved_replica():
    ids, homes, table = np.array([[0], [0]]), np.array([0, 0]), everywhere(2, 2)
    with pytest.raises(AssertionError, match="another expert"):
        rows_of(table, 0, ids, homes, np.array([[0], [1]]))
    starved = rows_of(table, 0, ids, homes, always_home_first(ids, homes, table))
    assert starved[:, [0, 2]].sum(axis=0).tolist() == [2, 0]
