"""Capacity: an expert takes so many rows and no more, and it is known which slots are dropped."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import RoutingError
from engine.kernels.router import RouterConfig
from engine.kernels.topk import route
from engine.routing.capacity import LEAST_ROWS, Capacity, check_factor, rows_allowed, spilled
from engine.routing.policy import RoutingPolicy


def oracle(ids, weights, allowed):
    """Give every expert its slots by weight, earlier rows first, and drop the rest."""
    kept, taken = set(), Counter()
    slots = [(t, k) for t in range(len(ids)) for k in range(len(ids[0]))]
    for token, slot in sorted(slots, key=lambda at: (-weights[at[0]][at[1]], at[0])):
        if taken[ids[token][slot]] < allowed:
            taken[ids[token][slot]] += 1
            kept.add((token, slot))
    return [[(t, k) not in kept for k in range(len(ids[0]))] for t in range(len(ids))]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 999))
def test_the_slots_with_least_weight_are_dropped_and_later_rows_first_among_equals(
    rows, allowed, seed
):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(rows, 5, generator=generator).argsort(-1)[:, :2]
    weights = torch.randint(1, 4, (rows, 2), generator=generator) / 4.0
    found = spilled(ids, weights, allowed)
    wanted = oracle(ids.tolist(), weights.tolist(), allowed)
    got = [[False, False]] * rows if found is None else found.tolist()
    assert got == wanted


def test_the_examples_hold():
    ids = torch.tensor([[0, 1], [0, 2], [0, 1]])
    weights = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.6, 0.4]])
    assert spilled(ids, weights, 1).tolist() == [[False, True], [True, False], [True, False]]
    assert rows_allowed(1.25, 40, 2, 8) == 13
    assert rows_allowed(1.0, 1, 2, 8) == LEAST_ROWS, "a few rows overload nobody"
    assert spilled(torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2), 4) is None


def test_a_layer_is_limited_counted_and_nothing_else_of_it_changes():
    logits = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    logits[:, 0] += 2.0
    chosen = route(logits, RouterConfig.softmax(2, renormalise=True))
    capacity = Capacity(1.25, 2, 8)
    placed = capacity.limit(chosen, chosen.topk_ids_TK, 1)
    dropped = placed < 0
    assert capacity.rows == [-1, 20] and capacity.dropped == [0, int(dropped.sum())]
    assert torch.equal(placed[~dropped], chosen.topk_ids_TK[~dropped])
    counts = torch.bincount(placed[~dropped], minlength=8)
    assert counts[0] == 20 and counts.max() <= 20
    hot = chosen.topk_ids_TK == 0
    assert (
        chosen.topk_weights_TK[dropped & hot].max() <= chosen.topk_weights_TK[~dropped & hot].min()
    )
    assert capacity.limit(chosen, chosen.topk_ids_TK, 0, lambda rows: 1000) is chosen.topk_ids_TK


@pytest.mark.parametrize("factor", [0.9, 0.0, -1.0, 16.1, float("nan"), float("inf")])
def test_a_factor_that_makes_no_sense_is_refused(factor):
    with pytest.raises(RoutingError, match="usual are 1.2 to 2"):
        check_factor(factor)
    with pytest.raises(RoutingError):
        RoutingPolicy(num_layers=1, num_experts=8, top_k=2).limited(factor)
    check_factor(None)
