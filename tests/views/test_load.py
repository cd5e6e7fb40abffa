"""Load by expert and by domain, with counts by hand."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.views.handmade import Row, start, trace
from workbench import views

# Experts 0 1 2 3 are chosen 3 1 0 0 times in layer 2, and 0 1 1 2 times in layer 5.
TWO_LAYERS = start(layers=(2, 5))
ROWS = [Row(0, 0, [(0, 1), (3, 2)]), Row(0, 1, [(0, -1), (3, 1)]), Row(1, 0, [(0, -1), (-1, -1)])]


def test_rows_shares_and_loads_are_those_counted_by_hand():
    table = views.expert_load(trace(ROWS, begin=TWO_LAYERS))
    assert table["layer"].tolist() == [2] * 4 + [5] * 4
    assert table["expert"].tolist() == [0, 1, 2, 3] * 2
    assert table["rows"].tolist() == [3, 1, 0, 0, 0, 1, 1, 2]
    assert table["share"].tolist() == [0.75, 0.25, 0, 0, 0, 0.25, 0.25, 0.5]
    assert table["load"].tolist() == [3, 1, 0, 0, 0, 1, 1, 2]


def test_a_layer_without_rows_has_no_share_rather_than_an_even_one():
    table = views.expert_load(trace([Row(0, 0, [(1, 2), (-1, -1)])], begin=TWO_LAYERS))
    assert table["rows"].tolist() == [0, 1, 1, 0, 0, 0, 0, 0]
    assert table["share"].tolist()[:4] == [0, 0.5, 0.5, 0]
    assert table["share"].isna().tolist() == [False] * 4 + [True] * 4


def test_rerun_rows_are_counted_when_asked_for():
    rows = [Row(0, 0, [(0, 1)]), Row(0, 0, [(0, 1)], step=1, cause="preemption")]
    assert views.expert_load(trace(rows))["rows"].sum() == 2
    assert views.expert_load(trace(rows), causes=None)["rows"].sum() == 4
    assert views.expert_load(trace(rows), causes=("preemption",))["rows"].sum() == 2


def test_domains_have_their_own_shares_and_lifts():
    # German: 0 1 / 0 2, Python: 3 2. In all: counts 2 1 2 1 of 6.
    rows = [Row(0, 0, [(0, 1)]), Row(0, 1, [(0, 2)]), Row(1, 0, [(3, 2)])]
    table = views.domain_load(trace(rows, labels={0: "de", 1: "py"}))
    german, python = table[table["domain"] == "de"], table[table["domain"] == "py"]
    assert german["rows"].tolist() == [2, 1, 1, 0]
    assert german["share"].tolist() == [0.5, 0.25, 0.25, 0]
    assert german["load"].tolist() == [2, 1, 1, 0]
    np.testing.assert_allclose(german["lift"], [1.5, 1.5, 0.75, 0])
    assert python["rows"].tolist() == [0, 0, 1, 1]
    np.testing.assert_allclose(python["lift"], [0, 0, 1.5, 3])


def test_a_request_nobody_named_stands_under_the_empty_domain():
    table = views.domain_load(trace([Row(0, 0, [(0, 1)]), Row(9, 0, [(2, 3)])], labels={0: "de"}))
    assert table.groupby("domain")["rows"].sum().to_dict() == {"": 2, "de": 2}


def test_the_lift_of_an_expert_nobody_chose_is_not_a_number():
    table = views.domain_load(trace([Row(0, 0, [(0, 1)])], labels={0: "de"}))
    assert table["lift"].tolist()[:2] == [1, 1]
    assert all(math.isnan(lift) for lift in table["lift"].tolist()[2:])


IDS = st.integers(-1, 4)
ROWS_OF_FIVE = st.lists(
    st.builds(
        Row,
        request=st.integers(0, 3),
        position=st.integers(0, 5),
        ids=st.tuples(st.tuples(IDS, IDS), st.tuples(IDS, IDS)),
        cause=st.sampled_from(["accepted", "preemption", "precision"]),
        home=st.integers(0, 2),
    ),
    max_size=12,
)
FIVE = start(experts=5, layers=(0, 3), devices=3, rank_of_phy=(0, 0, 1, 1, 2))


@settings(max_examples=60, deadline=None)
@given(ROWS_OF_FIVE)
def test_counts_agree_with_a_plain_loop(rows):
    counted = {(layer, expert): 0 for layer in (0, 3) for expert in range(5)}
    for row in rows:
        for layer, ids in zip((0, 3), row.ids, strict=True):
            for expert in ids:
                if expert >= 0 and row.cause == "accepted":
                    counted[layer, expert] += 1
    table = views.expert_load(trace(rows, begin=FIVE))
    assert (
        dict(zip(zip(table["layer"], table["expert"], strict=True), table["rows"], strict=True))
        == counted
    )


@settings(max_examples=40, deadline=None)
@given(ROWS_OF_FIVE)
def test_the_domains_sum_to_the_whole(rows):
    named = trace(rows, begin=FIVE, labels={0: "de", 1: "de", 2: "py"})
    whole = views.expert_load(named).set_index(["layer", "expert"])["rows"]
    parts = views.domain_load(named).groupby(["layer", "expert"])["rows"].sum()
    if any(row.cause == "accepted" for row in rows):
        assert parts.to_dict() == whole.to_dict()
    else:
        assert parts.empty
