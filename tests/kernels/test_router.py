"""The router on the CPU, plain and in tiles: every kind against the oracle, at every size."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial

import pytest
import torch

from engine.kernels import reference_router, tiled, topk
from engine.kernels.router import RouterConfig
from tests.kernels.router_cases import *  # noqa: F403  (the tests that every path passes)
from tests.kernels.router_cases import agrees_in_full
from tests.kernels.router_inputs import KINDS, agrees, case, cases

SIZES = (1, 2, 7, 8, 60, 61, 128, 256, 384, 512)


def by_keys(*arguments, **options):
    """Route by sorted keys whatever the size."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(topk, "_KEYS_FROM", 0)
        return topk.route(*arguments, **options)


PATHS = {"torch": topk.route, "torch by keys": by_keys, "tiled": tiled.topk}


@pytest.fixture(params=PATHS)
def path(request):
    return PATHS[request.param]


@pytest.mark.parametrize("num_experts", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_agrees_with_the_oracle_at_every_k(kind, num_experts):
    ks = {*range(1, 17), num_experts} if num_experts < 100 else {1, 2, 7, 8, 15, 16, num_experts}
    for given in cases(kind, num_experts, iter(sorted(ks & set(range(1, num_experts + 1)))), 17):
        for num_tokens, (name, path) in itertools.product((0, 1, 3, 17), PATHS.items()):
            assert agrees_in_full(path, given.first(num_tokens)), (given.router, num_tokens, name)


def test_large_batches_agree_with_small_ones_bit_for_bit():
    for kind, k in itertools.product(KINDS, (1, 2, 8)):
        for given in cases(kind, 256, iter([k]), 0):
            logits = torch.randn(300, 256, generator=torch.Generator().manual_seed(k))
            route = partial(topk.route, router=given.router, **given.biases)
            whole = route(logits)
            for row in (0, 7, 299):
                alone = route(logits[row : row + 1])
                assert torch.equal(alone.topk_ids_TK[0], whole.topk_ids_TK[row])
                assert torch.equal(alone.topk_weights_TK[0], whole.topk_weights_TK[row])


# --- negative controls: each of these faults is seen by `agrees` ----------------------------------


def test_a_right_choice_passes_the_check_that_wrong_ones_fail():
    for kind in KINDS:
        (given,) = cases(kind, 60, iter([2]), 17)
        chosen = given.run(topk.route)
        ids, weights = chosen.topk_ids_TK, chosen.topk_weights_TK
        assert agrees(chosen, given.oracle)
        for wrong in (
            chosen._replace(topk_weights_TK=torch.zeros_like(weights)),
            chosen._replace(topk_weights_TK=weights.roll(1, 0)),
            chosen._replace(topk_weights_TK=weights * 1.001),
            chosen._replace(topk_ids_TK=ids.flip(1)),
            chosen._replace(topk_ids_TK=ids.roll(1, 0)),
            chosen._replace(topk_ids_TK=(ids + 1) % 60),
            chosen._replace(topk_ids_TK=ids[1:], topk_weights_TK=weights[1:]),
        ):
            assert not agrees(wrong, given.oracle)


WRONG = {
    "not renormalised": {"renormalise": False},
    "scaled by another factor": {"scale": 2.5**2},
    "scored by softmax": {"score": "softmax"},
    "groups ignored": {"groups": None},
    "groups by their best alone": {"score_groups": "max"},
    "one group more": {"keep": 3},
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_router_with_one_fault_fails_the_check(fault):
    given = case(KINDS["deepseek-v3"](4, 60), 64, 60)
    changes = dict(WRONG[fault])
    limit = {
        name.removesuffix("_groups"): changes.pop(name)
        for name in ("score_groups", "keep")
        if name in changes
    }
    if limit:
        changes["groups"] = dataclasses.replace(given.router.groups, **limit)
    wrong = dataclasses.replace(given.router, **changes)
    assert not agrees(topk.route(given.logits_TE, wrong, **given.biases), given.oracle)


def test_a_bias_that_leaks_into_the_weights_fails_the_check():
    for kind in ("deepseek-v3", "deepseek-v4", "deepseek-v3, one group"):
        (given,) = cases(kind, 60, iter([4]), 17)
        chosen = given.run(topk.route)
        leaked = chosen.topk_weights_TK + given.biases["selection_bias_E"][chosen.topk_ids_TK]
        assert not agrees(chosen._replace(topk_weights_TK=leaked), given.oracle)


def test_a_bias_that_is_left_out_or_added_to_the_logits_fails_the_check():
    for kind in ("deepseek-v3", "deepseek-v4", "gpt-oss"):
        (given,) = cases(kind, 60, iter([4]), 17)
        (name, bias) = next(iter(given.biases.items()))
        none = {name: torch.zeros(60)}
        assert not agrees(topk.route(given.logits_TE, given.router, **none), given.oracle)
        if name == "selection_bias_E":
            moved = topk.route(given.logits_TE + bias, given.router, **none)
            assert not agrees(moved, given.oracle)


def test_masking_with_zero_fails_the_check_where_orders_are_negative():
    given = case(KINDS["deepseek-v3"](4, 60), 17, 60)
    lower = {"selection_bias_E": given.biases["selection_bias_E"] - 3}
    oracle = reference_router.route(given.logits_TE, given.router, **lower)
    zero = dataclasses.replace(
        given.router, groups=dataclasses.replace(given.router.groups, masked=0.0)
    )
    assert agrees(topk.route(given.logits_TE, given.router, **lower), oracle)
    assert not agrees(topk.route(given.logits_TE, zero, **lower), oracle)


def test_ties_to_the_higher_expert_fail_the_check():
    router = RouterConfig.softmax(3, renormalise=True)
    logits = torch.randint(0, 3, (17, 12), generator=torch.Generator().manual_seed(0)).float()
    oracle = reference_router.route(logits, router)
    mirrored = topk.route(logits.flip(1), router)
    assert agrees(topk.route(logits, router), oracle)
    assert not agrees(mirrored._replace(topk_ids_TK=11 - mirrored.topk_ids_TK), oracle)


def test_a_softmax_of_the_logits_near_the_best_alone_fails_where_phimoe_takes_two_steps():
    (given,) = cases("phimoe", 60, iter([2]), 17)
    for router in (RouterConfig.softmax(2, renormalise=True), RouterConfig.phimoe(jitter=0.2)):
        assert not agrees(topk.route(given.logits_TE, router), given.oracle)
