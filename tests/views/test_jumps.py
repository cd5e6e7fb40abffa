"""The jump rate against hand counts, a plain loop, and draws that really are independent."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.views.handmade import ONE_TOKEN, Row, start, trace
from tests.views.test_load import FIVE, ROWS_OF_FIVE
from workbench import views
from workbench.views.jumps import expected_rate


def line(table, choice, domain="all"):
    return table[(table["choice"] == choice) & (table["domain"] == domain)].iloc[0]


# Firsts 0 0 1 1, sets {0,1} {0,2} {0,1} {1,2}; 3 pairs.
SEQUENCE = [Row(0, p, [ids]) for p, ids in enumerate([(0, 1), (0, 2), (1, 0), (1, 2)])]


def test_rates_are_those_counted_by_hand():
    table = views.jump_rate(trace(SEQUENCE))
    first, sets = line(table, "first"), line(table, "set")
    assert (first["pairs"], first["jumps"]) == (3, 1)
    assert first["rate"] == pytest.approx(1 / 3)
    assert first["expected"] == pytest.approx(1 - (2 + 2) / (4 * 3))
    assert (sets["pairs"], sets["jumps"]) == (3, 3)
    # Choices {0,1} twice, {0,2}, {1,2}: 1 - 2 / 12.
    assert sets["expected"] == pytest.approx(1 - 2 / 12)


def test_the_order_within_a_set_is_no_jump_of_the_set_but_one_of_the_first():
    table = views.jump_rate(trace([Row(0, 0, [(0, 1)]), Row(0, 1, [(1, 0)])]))
    assert line(table, "set")["rate"] == 0 and line(table, "first")["rate"] == 1


def test_neighbours_are_positions_of_one_request_in_any_order_of_running():
    rows = [
        Row(1, 1, [(2, 3)], step=0),
        Row(0, 1, [(0, 1)], step=1),
        Row(0, 0, [(0, 1)], step=2),
        Row(1, 3, [(0, 1)], step=3),  # position 2 is missing: no pair
    ]
    table = views.jump_rate(trace(rows))
    assert line(table, "set")["pairs"] == 1 and line(table, "set")["jumps"] == 0


def test_of_a_token_run_again_the_last_run_counts_when_asked_for():
    rows = [
        Row(0, 0, [(0, 1)]),
        Row(0, 1, [(0, 1)]),
        Row(0, 1, [(2, 3)], step=1, cause="recovery"),
    ]
    assert line(views.jump_rate(trace(rows)), "set")["jumps"] == 0
    again = line(views.jump_rate(trace(rows), causes=None), "set")
    assert (again["pairs"], again["jumps"]) == (1, 1)


def test_a_token_without_experts_makes_no_pair():
    rows = [Row(0, 0, [(0, 1)]), Row(0, 1, [(-1, -1)]), Row(0, 2, [(0, -1)])]
    first = line(views.jump_rate(trace(rows)), "first")
    assert first["pairs"] == 0 and math.isnan(first["rate"])
    assert first["expected"] == 0, "both tokens that chose took expert 0"


def test_a_free_first_slot_does_not_hide_the_best_expert():
    rows = [Row(0, 0, [(-1, 2)]), Row(0, 1, [(2, -1)])]
    assert line(views.jump_rate(trace(rows)), "first")["jumps"] == 0


def test_one_token_has_no_rate_and_no_expectation():
    table = views.jump_rate(ONE_TOKEN)
    assert table["pairs"].tolist() == [0, 0]
    assert table[["rate", "expected"]].isna().all(axis=None)


def test_domains_are_compared_with_their_own_load():
    rows = [Row(0, p, [(0, 1)]) for p in range(3)] + [Row(1, p, [(p, 3)]) for p in range(3)]
    table = views.jump_rate(trace(rows, labels={0: "de", 1: "py"}), by_domain=True)
    assert line(table, "first", "de")[["rate", "expected"]].tolist() == [0, 0]
    assert line(table, "first", "py")[["rate", "expected"]].tolist() == [1, 1]


def drawn(experts: np.ndarray):
    begin = start(experts=8, top_k=1, rank_of_phy=(0,) * 8)
    return trace([Row(0, p, [(int(e),)]) for p, e in enumerate(experts)], begin=begin)


SKEWED = np.random.default_rng(0).choice(
    8, size=4000, p=[0.5, 0.2, 0.1, 0.1, 0.04, 0.03, 0.02, 0.01]
)


def test_independent_draws_jump_as_often_as_expected_whatever_the_load():
    found = line(views.jump_rate(drawn(SKEWED)), "first")
    assert found["rate"] == pytest.approx(found["expected"], abs=0.02)


def test_sticky_choices_with_the_same_load_jump_less_than_expected():
    found = line(views.jump_rate(drawn(np.sort(SKEWED))), "first")
    unsorted = line(views.jump_rate(drawn(SKEWED)), "first")
    assert found["jumps"] == 7
    assert found["expected"] == unsorted["expected"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=9))
def test_the_expected_rate_is_the_mean_over_all_pairs(choices):
    pairs = list(itertools.combinations(choices, 2))
    rate = expected_rate(np.array(choices))
    if pairs:
        assert rate == pytest.approx(sum(a != b for a, b in pairs) / len(pairs), abs=1e-12)
    else:
        assert math.isnan(rate)


@settings(max_examples=60, deadline=None)
@given(ROWS_OF_FIVE)
def test_rates_agree_with_a_plain_loop(rows):
    last = {(row.request, row.position): row for row in rows if row.cause == "accepted"}
    counted = {(layer, choice): [0, 0] for layer in (0, 3) for choice in ("set", "first")}
    for (request, position), row in last.items():
        after = last.get((request, position + 1))
        for at, layer in enumerate((0, 3)):
            here = [e for e in row.ids[at] if e >= 0]
            there = [e for e in after.ids[at] if e >= 0] if after else []
            if not here or not there:
                continue
            for choice, jumped in (
                ("set", sorted(row.ids[at]) != sorted(after.ids[at])),
                ("first", here[0] != there[0]),
            ):
                counted[layer, choice][0] += 1
                counted[layer, choice][1] += jumped
    table = views.jump_rate(trace(rows, begin=FIVE))
    found = {
        (layer, choice): [pairs, jumps]
        for layer, choice, pairs, jumps in table[["layer", "choice", "pairs", "jumps"]].values
    }
    assert found == (counted if last else {})
