"""What every path of the router must do, whatever it runs on.

`test_router.py` and `interpreted/test_router.py` import these tests and bring the fixture `path`.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import ConfigError, KernelError
from engine.kernels import reference_router
from engine.kernels.router import GroupLimit, RouterConfig
from tests.kernels.router_inputs import Case, agrees, case, explains
from tests.numerics import close

TOP_2 = RouterConfig.softmax(2, renormalise=True)
NAN, INF = math.nan, math.inf


# The largest number minus the lowest is inf, as it should be; only the interpreter's numpy warns.
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_k2_broken_logits_choose_distinct_experts_with_finite_weights(path):
    rows = [
        [NAN] * 8,
        [INF] * 8,
        [-INF] * 8,
        [NAN, 1.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        [0.0, 1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0],
        [0.0, INF, 2.0, INF, -INF, 0.0, 0.0, 0.0],
    ]
    limit = GroupLimit(num_groups=4, keep=2, score="top2_sum", masked=-INF)
    bias = {"selection_bias_E": torch.zeros(8)}
    for router, biases in (
        (RouterConfig.softmax(3, renormalise=True), {}),
        (RouterConfig.softmax(3, renormalise=False), {}),
        (RouterConfig.llama4(3), {}),
        (RouterConfig.phimoe(), {}),
        (RouterConfig.deepseek_v3(3), bias),
        (RouterConfig.deepseek_v4(3), bias),
        (RouterConfig(top_k=3, score="sigmoid", renormalise=True, groups=limit), {}),
    ):
        chosen = path(torch.tensor(rows), router, **biases)
        assert int(chosen.bad_rows) == 5
        assert chosen.topk_weights_TK.isfinite().all()
        for ids in chosen.topk_ids_TK.tolist():
            assert len(set(ids)) == router.top_k and set(ids) <= set(range(8))
        if router.groups is None:  # 1 and 0 are worth more than 1 and nothing
            assert chosen.topk_ids_TK[3, :2].tolist() == [2, 1]
            assert chosen.topk_ids_TK[5, :2].tolist() == [1, 3]


def test_the_groups_that_are_shut_are_told_and_a_preferred_expert_is_not_among_them(path):
    logits = torch.tensor([[0.0, 0, 2.2, 1.4, 0, 0, 0, 0], [3.0, 2, 0, 0, 0, 0, 0, 0]])
    router = RouterConfig.deepseek_v3(2, num_groups=4, keep=1)
    biases = {"selection_bias_E": torch.full((8,), -2.0)}
    shut = torch.ones(2, 8, dtype=torch.bool)
    shut[0, 2:4] = shut[1, :2] = False
    chosen = path(logits, router, **biases)
    assert chosen.shut_TE.dtype == torch.bool and torch.equal(chosen.shut_TE, shut)
    preferred = torch.arange(8) == 6
    shut[:, 6] = False
    assert torch.equal(path(logits, router, preferred_E=preferred, **biases).shut_TE, shut)
    by_best = RouterConfig.deepseek_v2(2, num_groups=2, keep=1)
    assert path(logits, by_best).shut_TE.tolist() == [[False] * 4 + [True] * 4] * 2
    assert path(logits[:0], by_best).shut_TE.shape == (0, 8)
    assert path(logits, router, explain=False, **biases).shut_TE is None
    assert path(logits, TOP_2).shut_TE is None, "it has no groups"


def test_a_bias_that_breaks_a_logit_makes_its_rows_bad(path):
    bias = torch.tensor([0.0, NAN, 0.0, 0.0])
    chosen = path(torch.zeros(3, 4), RouterConfig.gpt_oss(2), logit_bias_E=bias)
    assert int(chosen.bad_rows) == 3
    assert chosen.topk_ids_TK.tolist() == [[0, 2]] * 3
    assert close(chosen.topk_weights_TK, torch.full((3, 2), 0.5), 1e-6)


def grouped(masked: float) -> RouterConfig:
    """Return the router of case K3; published with -inf."""
    limit = GroupLimit(num_groups=4, keep=1, score="top2_sum", masked=masked)
    return RouterConfig(
        top_k=2, score="sigmoid", renormalise=True, eps=1e-20, selection_bias=True, groups=limit
    )


def test_k3_a_negative_bias_leaves_the_choice_inside_the_best_group(path):
    logits = torch.tensor([[0.0, 0.0, 2.2, 1.4, 0.0, 0.0, 0.0, 0.0]])
    bias = torch.full((8,), -2.0)
    chosen = path(logits, grouped(-INF), selection_bias_E=bias)
    assert chosen.topk_ids_TK.tolist() == [[2, 3]]
    assert chosen.topk_weights_TK[0].tolist() == pytest.approx([0.5288, 0.4712], abs=1e-4)
    assert chosen.scores_TE[0, 2:4].tolist() == pytest.approx([0.9002, 0.8022], abs=1e-4)
    assert chosen.ranked_scores_TJ[0].tolist() == pytest.approx([-1.0998, -1.1978, -INF], abs=1e-4)
    wrong = path(logits, grouped(0.0), selection_bias_E=bias)
    assert wrong.topk_ids_TK.tolist() == [[0, 1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_k4_weights_that_all_vanish_stay_finite(path, dtype):
    logits = torch.full((1, 8), -200.0, dtype=dtype)
    bias = torch.zeros(8)
    bias[[1, 3]] = 1.0
    for eps in (1e-20, 0.0):
        router = RouterConfig(
            top_k=2, score="sigmoid", renormalise=True, eps=eps, selection_bias=True
        )
        chosen = path(logits, router, selection_bias_E=bias)
        assert chosen.topk_ids_TK.tolist() == [[1, 3]]
        assert chosen.topk_weights_TK.isfinite().all()
        assert int(chosen.bad_rows) == 0


def test_k5_weights_are_renormalised_and_scaled_once(path):
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    for renormalise, scale, expected in (
        (False, 1.0, [0.6439, 0.2369]),
        (True, 1.0, [0.7311, 0.2689]),
        (False, 2.5, [1.6098, 0.5922]),
        (True, 2.5, [1.8276, 0.6724]),
    ):
        chosen = path(logits, RouterConfig.softmax(2, renormalise=renormalise, scale=scale))
        assert chosen.topk_weights_TK[0].tolist() == pytest.approx(expected, abs=1e-4)


def test_k6_no_tokens_give_an_empty_choice_of_the_right_kind(path):
    for router in (TOP_2, RouterConfig.phimoe(), grouped(-INF)):
        bias = {"selection_bias_E": torch.zeros(8)} if router.selection_bias else {}
        chosen = path(torch.empty(0, 8), router, **bias)
        assert chosen.topk_ids_TK.shape == (0, 2) and chosen.topk_ids_TK.dtype == torch.int64
        assert chosen.topk_weights_TK.shape == (0, 2)
        assert chosen.topk_weights_TK.dtype == torch.float32
        assert chosen.ranked_ids_TJ.shape == (0, 3) and chosen.scores_TE.shape == (0, 8)
        assert int(chosen.bad_rows) == 0


def test_k6_five_tokens_may_all_want_one_expert(path):
    logits = torch.zeros(5, 8)
    logits[:, 0] = 1.0
    chosen = path(logits, RouterConfig.softmax(1, renormalise=True))
    assert chosen.topk_ids_TK.tolist() == [[0]] * 5
    assert chosen.topk_weights_TK.tolist() == [[1.0]] * 5


def test_equal_scores_go_to_the_lower_expert_and_the_lower_group(path):
    flat = torch.zeros(3, 40)
    flat[1] = -0.0
    flat[2, ::2] = -0.0
    for router in (
        RouterConfig.softmax(5, renormalise=True),
        RouterConfig.softmax(5, renormalise=False),
        RouterConfig.llama4(5),
        RouterConfig.deepseek_v2(5, num_groups=8, keep=2),
        RouterConfig.deepseek_v3(5, num_groups=8, keep=2),
        RouterConfig.deepseek_v4(5),
    ):
        bias = {"selection_bias_E": torch.zeros(40)} if router.selection_bias else {}
        chosen = path(flat, router, **bias)
        assert chosen.ranked_ids_TJ.tolist() == [[0, 1, 2, 3, 4, 5]] * 3
    late = torch.zeros(1, 40)
    late[0, [37, 23]] = 1.0
    chosen = path(late, RouterConfig.deepseek_v2(3, num_groups=8, keep=2))
    assert chosen.topk_ids_TK.tolist() == [[23, 37, 20]]


def test_logits_too_far_apart_for_fp32_scores_are_still_told_apart(path):
    logits = torch.tensor([[900.0, 0.0, 1.0, 0.5]])
    chosen = path(logits, RouterConfig.softmax(3, renormalise=True))
    assert chosen.topk_ids_TK.tolist() == [[0, 2, 3]]
    sure = path(torch.tensor([[30.0, 31.0, 40.0]]), RouterConfig.llama4(2))
    assert sure.topk_ids_TK.tolist() == [[2, 1]]


def test_the_two_steps_of_phimoe_weigh_only_what_lies_close(path):
    logits = torch.tensor([[1.0, 1.0, 0.99, 0.0], [-1.0, -1.01, -3.0, -2.0]])
    chosen = path(logits, RouterConfig.phimoe())
    assert chosen.topk_ids_TK.tolist() == [[0, 1], [0, 1]]
    close_by = math.exp(-0.01)
    expected = [[1 / (2 + close_by), 1 / (1 + close_by)], [1 / (1 + close_by), 1.0]]
    assert close(chosen.topk_weights_TK, torch.tensor(expected), 1e-6)


def test_without_an_explanation_the_choice_is_the_same(path):
    for router in (TOP_2, RouterConfig.softmax(2, renormalise=False), RouterConfig.deepseek_v3(2)):
        given = case(router, 9, 60)
        full, short = given.run(path), given.run(path, explain=False)
        assert torch.equal(full.topk_ids_TK, short.topk_ids_TK)
        assert torch.equal(full.topk_weights_TK, short.topk_weights_TK)
        assert short.ranked_ids_TJ is short.ranked_scores_TJ is short.scores_TE is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_widened_before_anything_else(path, dtype):
    for router in (TOP_2, RouterConfig.softmax(2, renormalise=False), RouterConfig.deepseek_v3(2)):
        given = case(router, 9, 60)
        half = given.logits_TE.to(dtype)
        oracle = reference_router.route(half, router, **given.biases)
        assert agrees(path(half, router, **given.biases), oracle)


def test_rows_that_are_not_next_to_each_other_are_read_in_place(path):
    given = case(TOP_2, 9, 60)
    wide = torch.full((18, 70), NAN)
    wide[::2, 5:65] = given.logits_TE
    chosen = path(wide[::2, 5:65], TOP_2)
    assert agrees(chosen, given.oracle) and int(chosen.bad_rows) == 0


def test_banned_experts_are_never_chosen_and_score_nothing(path):
    banned = torch.zeros(8, dtype=torch.bool)
    banned[[0, 6]] = True
    for router in (
        RouterConfig.softmax(6, renormalise=True),
        RouterConfig.deepseek_v3(4, num_groups=4, keep=2),
        RouterConfig.deepseek_v2(4, num_groups=4, keep=2),
        RouterConfig.deepseek_v4(6),
    ):
        given = case(router, 20, 8)
        if router.selection_bias:
            given.biases["selection_bias_E"][[0, 6]] = 9.0
        chosen = given.run(path, banned_E=banned)
        assert not {0, 6} & set(chosen.topk_ids_TK.flatten().tolist())
        assert (chosen.scores_TE[:, banned] == 0).all()
        assert chosen.topk_weights_TK.isfinite().all()


def test_preferred_experts_come_first_with_their_own_scores(path):
    preferred = torch.zeros(8, dtype=torch.bool)
    preferred[[3, 5]] = True
    for router in (
        RouterConfig.softmax(3, renormalise=False),
        RouterConfig.llama4(3),
        RouterConfig.deepseek_v2(3, num_groups=4, keep=2),
    ):
        given = case(router, 20, 8)
        chosen = given.run(path, preferred_E=preferred)
        assert {frozenset(ids) for ids in chosen.topk_ids_TK[:, :2].tolist()} == {frozenset((3, 5))}
        expected = chosen.scores_TE.gather(1, chosen.topk_ids_TK)
        assert close(chosen.topk_weights_TK, expected, 1e-6)
        assert (chosen.topk_weights_TK[:, 0] >= chosen.topk_weights_TK[:, 1]).all()


@settings(
    deadline=None,
    max_examples=20,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_ties_bans_and_favours_are_ranked_by_class_then_score_then_id(path, data):
    num_experts = data.draw(st.integers(1, 20))
    num_tokens = data.draw(st.integers(0, 5))
    row = st.lists(st.integers(-2, 2), min_size=num_experts, max_size=num_experts)
    rows = data.draw(st.lists(row, min_size=num_tokens, max_size=num_tokens))
    classes = data.draw(st.lists(st.integers(-1, 1), min_size=num_experts, max_size=num_experts))
    classes[data.draw(st.integers(0, num_experts - 1))] = 0
    k = data.draw(st.integers(1, num_experts))
    logits = torch.tensor(rows, dtype=torch.float32).view(num_tokens, num_experts)
    of = torch.tensor(classes)
    router = RouterConfig.softmax(k, renormalise=False)
    chosen = path(logits, router, preferred_E=of == 1, banned_E=of == -1)

    def place(values: list[int], expert: int) -> tuple[int, int, int]:
        banned = classes[expert] == -1
        return -classes[expert], 0 if banned else -values[expert], expert

    expected = [sorted(range(num_experts), key=partial(place, values)) for values in rows]
    expected = [ranked[: k + 1] for ranked in expected]
    assert chosen.ranked_ids_TJ.tolist() == expected


def test_what_does_not_fit_is_refused_in_one_sentence_with_both_shapes(path):
    logits, bias = torch.zeros(3, 8), torch.zeros(8)
    v3 = RouterConfig.deepseek_v3(2)
    mask = torch.zeros(8, dtype=torch.bool)
    for arguments, options, words in (
        ((torch.zeros(8), TOP_2), {}, ["logits_TE", "(8,)", "T, E"]),
        ((torch.zeros(3, 8, dtype=torch.int64), TOP_2), {}, ["logits_TE", "int64", "float32"]),
        ((logits, v3), {}, ["selection_bias_E", "None"]),
        ((logits, TOP_2), {"selection_bias_E": bias}, ["selection_bias_E", "no selection_bias"]),
        ((logits, TOP_2), {"logit_bias_E": bias}, ["logit_bias_E", "no logit_bias"]),
        ((logits, v3), {"selection_bias_E": bias[:7]}, ["selection_bias_E", "(7,)", "(3, 8)"]),
        ((logits, v3), {"selection_bias_E": bias.double()}, ["selection_bias_E", "float64"]),
        ((logits, v3), {"selection_bias_E": bias.to("meta")}, ["selection_bias_E", "meta"]),
        ((logits, TOP_2), {"banned_E": mask[:5]}, ["banned_E", "(5,)", "(3, 8)"]),
        ((logits, TOP_2), {"preferred_E": bias}, ["preferred_E", "float32", "bool"]),
    ):
        with pytest.raises(KernelError) as caught:
            path(*arguments, **options)
        message = str(caught.value)
        assert all(word in message for word in words), message
        assert "\n" not in message and message.endswith(".")
    with pytest.raises(ConfigError, match=r"top_k \(9\) must be at most .* \(8\)"):
        path(logits, RouterConfig.softmax(9, renormalise=True))
    with pytest.raises(ConfigError, match=r"experts \(8\) must be a multiple of num_groups \(3\)"):
        path(logits, RouterConfig.deepseek_v2(2, num_groups=3, keep=1))


def agrees_in_full(path, given: Case) -> bool:
    """Whether a path's choice, its explanation included, is the oracle's."""
    chosen = given.run(path)
    return agrees(chosen, given.oracle) and explains(chosen, given.oracle)
