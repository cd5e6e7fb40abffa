"""The Triton router, interpreted: the tests that every path passes, and every kind."""

from __future__ import annotations

import pytest
import torch

from engine.errors import KernelError
from engine.kernels.gpu import topk
from engine.kernels.router import RouterConfig
from tests.kernels.router_cases import *  # noqa: F403  (the tests that every path passes)
from tests.kernels.router_cases import TOP_2, agrees_in_full
from tests.kernels.router_inputs import KINDS, agrees, case, cases

SHAPES = [(1, 1, 3), (2, 2, 3), (7, 7, 1), (8, 2, 33), (60, 4, 17), (61, 16, 3), (512, 8, 3)]
"""(experts, K, tokens); a program takes 16 rows here."""


@pytest.fixture
def path():
    return topk.route


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_agrees_with_the_oracle(kind, shape):
    num_experts, k, num_tokens = shape
    for given in cases(kind, num_experts, iter([k]), num_tokens):
        assert agrees_in_full(topk.route, given)


@pytest.mark.parametrize(("num_experts", "k"), [(128, 2), (256, 16), (384, 8), (512, 16), (61, 61)])
def test_large_routers_agree_with_the_oracle(num_experts, k):
    for kind in ("softmax, renormalised", "deepseek-v3", "deepseek-v3, one group", "phimoe"):
        for given in cases(kind, num_experts, iter([k]), 3):
            assert agrees_in_full(topk.route, given)


def same(one, other):
    """Say whether two parts of a selection are equal, or both left out."""
    return one is other is None or torch.equal(one, other)


@pytest.mark.parametrize("block_rows", [1, 4])
def test_the_number_of_rows_in_a_program_changes_nothing(block_rows, monkeypatch):
    given = case(KINDS["deepseek-v3"](2, 8), 7, 8)
    before = given.run(topk.route)
    monkeypatch.setattr(topk, "_block_rows", lambda width: block_rows)
    after = given.run(topk.route)
    assert all(map(same, before, after))


def test_a_row_does_not_depend_on_its_neighbours():
    given = case(RouterConfig.softmax(8, renormalise=True), 20, 60)
    whole = given.run(topk.route)
    alone = topk.route(given.logits_TE[19:], given.router)
    assert all(torch.equal(a[0], w[19]) for a, w in zip(alone[:5], whole[:5], strict=True))


def test_ids_come_back_in_32_bits_when_asked():
    given = case(TOP_2, 3, 60)
    chosen = given.run(topk.route, ids_dtype=torch.int32)
    assert chosen.topk_ids_TK.dtype == chosen.ranked_ids_TJ.dtype == torch.int32
    assert torch.equal(chosen.topk_ids_TK.long(), given.oracle.topk_ids_TK)


def test_columns_that_are_not_neighbours_and_too_many_experts_are_refused():
    with pytest.raises(KernelError, match=r"logits_TE \(8, 3\) float32 has stride 8"):
        topk.route(torch.zeros(3, 8).T, TOP_2)
    with pytest.raises(KernelError, match=r"\(1, 1025\).*at most 1024"):
        topk.route(torch.zeros(1, 1025), TOP_2)


def test_the_check_fails_for_a_kernel_with_one_fault(monkeypatch):
    given = case(KINDS["deepseek-v3"](4, 60), 16, 60)
    constants = topk._constants
    for fault in (
        {"RENORMALISE": False},
        {"BY_TWO": False},
        {"KEEP": 3},
        {"MASKED": 5.0},
        {"SCORE": "softmax"},
        {"WEIGHS_LOGITS": True, "SCORE": "softmax"},
    ):
        monkeypatch.setattr(topk, "_constants", lambda *of, f=fault: constants(*of) | f)
        assert not agrees(given.run(topk.route), given.oracle), fault
    monkeypatch.setattr(topk, "_constants", constants)
    assert agrees_in_full(topk.route, given)


def test_biases_and_masks_of_any_stride_are_read_right():
    def strided(tensor):
        wide = torch.ones(len(tensor), 2, dtype=tensor.dtype)
        wide[:, 0] = tensor
        return wide[:, 0]

    generator = torch.Generator().manual_seed(3)
    logits, bias = torch.randn(5, 8, generator=generator), torch.randn(8, generator=generator)
    mask = torch.tensor([0, 1, 0, 0, 0, 0, 0, 0], dtype=torch.bool)
    for router, name, given in (
        (RouterConfig.gpt_oss(2), "logit_bias_E", bias),
        (KINDS["deepseek-v3"](2, 8), "selection_bias_E", bias),
        (TOP_2, "preferred_E", mask),
        (TOP_2, "banned_E", mask),
    ):
        assert not strided(given).is_contiguous()
        dense = topk.route(logits, router, **{name: given})
        found = topk.route(logits, router, **{name: strided(given)})
        assert all(map(same, found, dense)), name
        other = topk.route(logits, router, **{name: torch.ones_like(given).logical_not().to(given)})
        assert not torch.equal(other.topk_weights_TK, dense.topk_weights_TK), "it matters"


def test_ids_of_another_format_and_a_counter_that_does_not_fit_are_refused():
    logits = torch.zeros(2, 8)
    for dtype in (torch.int8, torch.int16, torch.float32):
        with pytest.raises(KernelError, match=rf"ids_dtype \({dtype}\) must be torch.int64 or"):
            topk.route(logits, TOP_2, ids_dtype=dtype)
    with pytest.raises(KernelError, match=r"bad_rows is \(1,\) int32 but must be \(\) int32"):
        topk.route(logits, TOP_2, bad_rows=torch.zeros(1, dtype=torch.int32))


def test_a_given_counter_holds_this_calls_broken_rows():
    counter = torch.tensor(9, dtype=torch.int32)
    logits = torch.zeros(3, 8)
    logits[1, 2] = float("nan")
    assert topk.route(logits, TOP_2, bad_rows=counter).bad_rows is counter
    assert counter.item() == 1
