"""Choosing experts, held against the plain oracle on both paths."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from engine.errors import ConfigError, KernelError
from engine.kernels import reference, topk
from engine.kernels.router import RouterConfig
from engine.kernels.tiled import topk as tiled_topk
from engine.kernels.topk import route
from tests.kernels.router_inputs import KINDS
from tests.numerics import close

PATHS = (route, tiled_topk)
SHAPES = [(1, 8, 2), (5, 8, 1), (17, 8, 8), (33, 60, 4), (3, 5, 3), (40, 257, 8), (2, 512, 16)]


def logits_of(tokens: int, experts: int, seed: int = 0, skew: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return skew * torch.randn(tokens, experts, generator=generator)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("renormalise", [True, False])
def test_ids_and_weights_equal_the_oracles(path, shape, renormalise):
    tokens, experts, k = shape
    for seed, skew in itertools.product(range(2), (0.1, 1.0, 8.0)):
        logits = logits_of(tokens, experts, seed, skew)
        ids, weights = reference.topk_softmax(logits, k, renormalise=renormalise)
        chosen = path(logits, RouterConfig.softmax(k, renormalise=renormalise))
        assert torch.equal(chosen.topk_ids_TK, ids)
        assert close(chosen.topk_weights_TK, weights, 1e-5)
        assert chosen.topk_weights_TK.dtype == torch.float32


@pytest.mark.parametrize("path", PATHS)
def test_weights_of_a_small_row_are_those_of_the_docstring(path):
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    plain = path(logits, RouterConfig.softmax(2, renormalise=False)).topk_weights_TK[0].tolist()
    normal = path(logits, RouterConfig.softmax(2, renormalise=True)).topk_weights_TK[0].tolist()
    scaled = (
        path(logits, RouterConfig.softmax(2, renormalise=False, scale=2.5))
        .topk_weights_TK[0]
        .tolist()
    )
    assert scaled == pytest.approx([1.6098, 0.5922], abs=1e-4)
    assert plain == pytest.approx([0.6439, 0.2369], abs=1e-4)
    assert normal == pytest.approx([0.7311, 0.2689], abs=1e-4)


@pytest.mark.parametrize("explain", [True, False])
def test_few_rows_are_chosen_to_the_last_bit_as_many_are(monkeypatch, explain):
    plain = logits_of(6, 60)
    tied, broken = plain.clone(), plain.clone()
    tied[2, 7] = tied[2].max()
    broken[3, 1], broken[4, 0] = math.nan, -math.inf
    for logits in (plain, tied, broken, plain[:, :4], plain[:0]):
        for k in (1, 4):
            for router in (RouterConfig.softmax(k, renormalise=True), RouterConfig.llama4(k)):
                with monkeypatch.context() as patch:
                    patch.setattr(topk, "_KEYS_FROM", 0)
                    wanted = route(logits, router, explain=explain)
                found = route(logits, router, explain=explain)
                for one, other in zip(found, wanted, strict=True):
                    same = torch.equal(one, other) if torch.is_tensor(one) else one == other
                    assert same
    assert route(broken, RouterConfig.softmax(2, renormalise=True)).bad_rows == 2


def test_the_oracle_check_fails_for_wrong_choices():
    logits = logits_of(9, 8)
    ids, weights = reference.topk_softmax(logits, 2, renormalise=True)
    unnormalised = route(logits, RouterConfig.softmax(2, renormalise=False)).topk_weights_TK
    assert not close(unnormalised, weights, 1e-5)
    assert not close(torch.zeros_like(weights), weights, 1e-5)
    assert not close(weights[:-1], weights, 1e-5)
    assert not torch.equal(ids.flip(1), ids)


@pytest.mark.parametrize("path", PATHS)
def test_equal_scores_go_to_the_lower_expert(path):
    chosen = path(
        torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]] * 20), RouterConfig.softmax(2, renormalise=True)
    )
    assert chosen.topk_ids_TK.tolist() == [[1, 2]] * 20
    assert chosen.ranked_ids_TJ[0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("path", PATHS)
def test_broken_logits_still_choose_distinct_experts_with_finite_weights(path):
    nan, inf = float("nan"), float("inf")
    rows = [
        [nan] * 8,
        [inf] * 8,
        [-inf] * 8,
        [nan, 1.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        [0.0, 1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0],
    ]
    chosen = path(torch.tensor(rows), RouterConfig.softmax(3, renormalise=True))
    assert chosen.bad_rows == 4
    assert chosen.topk_weights_TK.isfinite().all()
    for ids in chosen.topk_ids_TK.tolist():
        assert len(set(ids)) == 3 and set(ids) <= set(range(8))
    assert chosen.topk_ids_TK[3, :2].tolist() == [2, 1]
    assert chosen.topk_ids_TK[4].tolist() == [3, 2, 1]


@pytest.mark.parametrize("path", PATHS)
def test_no_tokens_give_empty_choices_of_the_right_kind(path):
    chosen = path(torch.empty(0, 8), RouterConfig.softmax(2, renormalise=True))
    assert chosen.topk_ids_TK.shape == (0, 2) and chosen.topk_ids_TK.dtype == torch.int64
    assert chosen.topk_weights_TK.shape == (0, 2)
    assert chosen.bad_rows == 0


@pytest.mark.parametrize("path", PATHS)
def test_banned_experts_are_never_chosen_and_score_nothing(path):
    logits = logits_of(50, 8)
    banned = torch.tensor([True] + [False] * 5 + [True, False])
    chosen = path(logits, RouterConfig.softmax(6, renormalise=True), banned_E=banned)
    assert not {0, 6} & set(chosen.topk_ids_TK.flatten().tolist())
    assert (chosen.scores_TE[:, banned] == 0).all()
    allowed = logits.masked_fill(banned, float("-inf"))
    assert close(chosen.scores_TE, torch.softmax(allowed.double(), -1), 1e-6)


@pytest.mark.parametrize("path", PATHS)
def test_preferred_experts_come_first_with_their_own_scores(path):
    logits = logits_of(50, 8)
    preferred = torch.zeros(8, dtype=torch.bool)
    preferred[[3, 5]] = True
    chosen = path(logits, RouterConfig.softmax(3, renormalise=False), preferred_E=preferred)
    assert {frozenset(row) for row in chosen.topk_ids_TK[:, :2].tolist()} == {frozenset((3, 5))}
    scores = torch.softmax(logits.double(), -1)
    assert close(chosen.topk_weights_TK, scores.gather(1, chosen.topk_ids_TK), 1e-6)
    first, second = chosen.topk_weights_TK[:, 0], chosen.topk_weights_TK[:, 1]
    assert (first >= second).all()


@pytest.mark.parametrize("path", PATHS)
def test_preferred_experts_that_score_too_little_for_fp32_still_get_weights(path):
    logits = torch.tensor([[900.0, 0.0, 1.0, 0.0]] * 3)
    preferred = torch.tensor([False, True, True, False])
    chosen = path(logits, RouterConfig.softmax(2, renormalise=True), preferred_E=preferred)
    for ids, weights in zip(chosen.topk_ids_TK, chosen.topk_weights_TK, strict=True):
        by_expert = dict(zip(ids.tolist(), weights.tolist(), strict=True))
        assert by_expert == pytest.approx({1: 0.2689, 2: 0.7311}, abs=1e-4)


def test_scores_rank_the_runner_up_right_behind_the_chosen():
    logits = logits_of(30, 8)
    chosen = route(logits, RouterConfig.softmax(2, renormalise=True))
    third = reference.topk_softmax(logits, 3, renormalise=False)[0][:, 2]
    assert torch.equal(chosen.ranked_ids_TJ[:, 2], third)


@pytest.mark.parametrize("path", PATHS)
def test_sparsemixer_with_one_expert_left_gives_it_all_the_weight(path):
    logits = logits_of(40, 8)
    banned = torch.ones(8, dtype=torch.bool)
    banned[5] = False
    chosen = path(logits, RouterConfig.phimoe(), banned_E=banned)
    assert chosen.topk_ids_TK.tolist() == [[5, 0]] * 40
    assert chosen.topk_weights_TK.tolist() == [[1.0, 0.0]] * 40


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", PATHS)
def test_weights_stay_finite_where_fewer_than_k_experts_are_left(path, kind):
    router = KINDS[kind](2, 8)
    biases = {}
    for name in ("logit_bias", "selection_bias"):
        if getattr(router, name):
            biases[f"{name}_E"] = torch.zeros(8)
    banned = torch.ones(8, dtype=torch.bool)
    banned[5] = False
    chosen = path(logits_of(9, 8), router, **biases, banned_E=banned)
    assert chosen.topk_ids_TK[:, 0].tolist() == [5] * 9
    assert chosen.topk_weights_TK.isfinite().all()
    assert (chosen.topk_weights_TK[:, 1] == 0).all()


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("path", PATHS)
def test_a_ban_of_all_experts_is_refused_in_one_sentence(path, tokens):
    for router in (RouterConfig.phimoe(), RouterConfig.softmax(2, renormalise=True)):
        with pytest.raises(KernelError, match=r"^banned_E \(8,\) bool bans all experts; leave at"):
            path(logits_of(tokens, 8), router, banned_E=torch.ones(8, dtype=torch.bool))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("path", PATHS)
def test_a_selection_bias_that_is_not_finite_makes_every_row_bad(path, bad):
    logits = logits_of(20, 8)
    bias = torch.zeros(8)
    bias[3] = bad
    for router in (
        RouterConfig.deepseek_v3(2),
        RouterConfig.deepseek_v3(2, num_groups=4, keep=2),
        RouterConfig.deepseek_v4(2),
    ):
        chosen = path(logits, router, selection_bias_E=bias)
        assert chosen.bad_rows == 20
        assert chosen.topk_weights_TK.isfinite().all()
        assert (chosen.topk_ids_TK == 3).any(-1).tolist() == [bad == math.inf] * 20
        assert path(logits, router, selection_bias_E=torch.zeros(8)).bad_rows == 0


@pytest.mark.parametrize("path", PATHS)
def test_a_large_finite_selection_bias_makes_no_row_bad(path):
    bias = torch.full((8,), 3e38)
    assert path(logits_of(5, 8), RouterConfig.deepseek_v3(2), selection_bias_E=bias).bad_rows == 0


@pytest.mark.parametrize("path", PATHS)
def test_logits_and_masks_that_are_no_dense_tensors_are_refused(path):
    logits, router = logits_of(3, 8), RouterConfig.softmax(2, renormalise=True)
    for wrong, said in (
        (lambda: path(logits.numpy(), router), "^logits_TE is of type ndarray"),
        (lambda: path(None, router), "^logits_TE is of type NoneType"),
        (lambda: path(logits.to_sparse(), router), "^logits_TE .* layout torch.sparse_coo"),
        (lambda: path(logits, router, banned_E=[True] * 8), "^banned_E is of type list"),
        (
            lambda: path(logits, router, preferred_E=torch.ones(8).bool().to_sparse()),
            "^preferred_E .* layout torch.sparse_coo",
        ),
    ):
        with pytest.raises(KernelError, match=said):
            wrong()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"renormalise": 1}, r"renormalise \(1\) must be True or False."),
        ({"logit_bias": torch.zeros(8)}, "logit_bias .* must be True or False."),
        ({"selection_bias": None}, r"selection_bias \(None\) must be True or False."),
        ({"groups": 4}, r"groups \(4\) must be a GroupLimit or None."),
        ({"scale": math.nan}, r"scale \(nan\) must be finite."),
        ({"scale": -math.inf}, r"scale \(-inf\) must be finite."),
        ({"scale": 1e300}, r"scale \(1e\+300\) must be at most 3.403e\+38, as in fp32."),
        ({"eps": 10**400}, "must be at most"),
        ({"jitter": math.inf}, r"jitter \(inf\) must be finite and at least 0."),
    ],
)
def test_a_router_with_options_of_the_wrong_kind_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        RouterConfig(top_k=2, **options)
