"""Pure data movement is compared bitwise; the weighted sum against the oracle."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import KernelError
from engine.kernels import cpu_experts, grouped_gemm, reference, tiled
from engine.kernels.combine import combine
from engine.kernels.experts import ExpertWeights
from engine.kernels.permute import permute
from tests.numerics import close

GROUPED = (
    (grouped_gemm.grouped_mlp, None),
    (tiled.grouped_mlp, None),
    (cpu_experts.columns_mlp, cpu_experts.prepare_columns),
    (cpu_experts.packed_mlp, cpu_experts.prepare_packed),
)


def test_permutation_of_a_small_batch_is_that_of_the_docstring():
    source, row_of, counts = permute(torch.tensor([[1, 0], [1, -1]]), 2)
    assert source.tolist() == [0, 0, 1]
    assert row_of.tolist() == [1, 0, 2, 3]
    assert counts == [1, 2]


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([[0, 5]], r"phy_ids_TK \(1, 2\) int64 holds the id 5 but 5 experts allow 0 to 4"),
        ([[-2, 0]], "holds the id -2"),
        ([[0, 3_000_000_000]], "holds the id 3000000000 but 5 experts"),
        ([[0, 2**63 - 1]], "holds the id 9223372036854775807"),
        ([[-(2**63), 0]], "holds the id -9223372036854775808"),
        ([0, 1], r"must have the axes \(T, K\)"),
        ([[0.0, 1.0]], "must be one of int64, int32"),
    ],
)
def test_ids_that_are_out_of_range_or_no_matrix_are_refused_in_one_sentence(ids, said):
    with pytest.raises(KernelError, match=said):
        permute(torch.tensor(ids), 5)


@st.composite
def ids_tables(draw):
    experts = draw(st.integers(1, 12))
    k = draw(st.integers(1, 4))
    rows = st.lists(st.integers(-1, experts - 1), min_size=k, max_size=k)
    return experts, k, draw(st.lists(rows, max_size=40))


@settings(max_examples=120, deadline=None)
@given(ids_tables())
def test_every_pair_gets_one_row_of_its_expert_in_the_order_of_tokens(table):
    experts, k, rows = table
    ids = torch.tensor(rows, dtype=torch.int64).view(len(rows), k)
    source, row_of, counts = permute(ids, experts)
    starts = [sum(counts[:expert]) for expert in range(experts)]
    wanted = {
        expert: [token for token, row in enumerate(rows) for one in row if one == expert]
        for expert in range(experts)
    }
    for expert in range(experts):
        got = source[starts[expert] : starts[expert] + counts[expert]].tolist()
        assert got == wanted[expert]
    for pair, expert in enumerate(ids.flatten().tolist()):
        row = int(row_of[pair])
        if expert == -1:
            assert row == len(source)
        else:
            assert starts[expert] <= row < starts[expert] + counts[expert]
            assert int(source[row]) == pair // k
    placed = [int(row) for row in row_of if int(row) < len(source)]
    assert sorted(placed) == list(range(len(source)))


def batch(tokens, experts, k, width, inner, *, loads="random", skip=False):
    generator = torch.Generator().manual_seed(tokens * 1000 + experts)
    x = torch.randn(tokens, width, generator=generator)
    if loads == "one":
        ids = torch.zeros(tokens, k, dtype=torch.int64)
    else:
        ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :k]
    if skip:
        ids[::3, 0] = -1
    weights = torch.rand(tokens, k, generator=generator)
    gate_up = torch.randn(experts, 2 * inner, width, generator=generator) * width**-0.5
    down = torch.randn(experts, width, inner, generator=generator) * inner**-0.5
    return x, ids, weights, gate_up, down


def run_moe(grouped, x, ids, weights, gate_up, down, experts=None):
    experts = experts or list(range(len(gate_up)))
    source, row_of, counts = permute(ids, len(experts))
    fn, prepare = grouped
    stacks = ExpertWeights(gate_up.clone(), down.clone(), prepare)
    out = fn(x.index_select(0, source), counts, experts, stacks)
    return combine(out, weights, row_of)


CASES = [
    (1, 8, 2, 32, 16, {}),
    (5, 8, 1, 32, 16, {"loads": "one"}),
    (17, 5, 5, 48, 16, {}),
    (33, 60, 4, 32, 48, {}),
    (40, 8, 2, 32, 16, {"skip": True}),
    (0, 8, 2, 32, 16, {}),
    (7, 1, 1, 32, 16, {}),
]


@pytest.mark.parametrize("grouped", GROUPED)
@pytest.mark.parametrize("case", CASES)
def test_experts_and_combine_equal_the_oracle(grouped, case):
    *shape, options = case
    x, ids, weights, gate_up, down = batch(*shape, **options)
    expected = reference.moe(x, ids, weights, gate_up, down)
    actual = run_moe(grouped, x, ids, weights, gate_up, down)
    assert actual.dtype == x.dtype
    assert close(actual, expected, 2e-5)


@pytest.mark.parametrize("grouped", GROUPED)
def test_the_oracle_check_fails_for_wrong_experts(grouped):
    x, ids, weights, gate_up, down = batch(17, 8, 2, 32, 16)
    expected = reference.moe(x, ids, weights, gate_up, down)
    swapped = gate_up.clone()
    swapped[[0, 1]] = gate_up[[1, 0]]
    assert not close(run_moe(grouped, x, ids, weights, swapped, down), expected, 2e-5)
    normal = weights / weights.sum(1, keepdim=True)
    assert not close(run_moe(grouped, x, ids, normal, gate_up, down), expected, 2e-5)
    dropped = ids.clone()
    dropped[4, 1] = -1
    assert not close(run_moe(grouped, x, dropped, weights, gate_up, down), expected, 2e-5)
    assert not close(torch.zeros_like(expected), expected, 2e-5)


@pytest.mark.parametrize("grouped", GROUPED)
def test_replicas_of_an_expert_share_its_weights(grouped):
    x, ids, weights, gate_up, down = batch(20, 4, 2, 32, 16)
    replicated = torch.where((ids == 1) & (torch.arange(20) % 2 == 0)[:, None], 4, ids)
    once = run_moe(grouped, x, ids, weights, gate_up, down)
    twice = run_moe(grouped, x, replicated, weights, gate_up, down, experts=[0, 1, 2, 3, 1])
    assert close(twice, once, 1e-5)


def test_poisoned_padding_never_reaches_a_token():
    out = torch.tensor([[1.0, 2.0], [float("inf"), float("nan")], [3.0, 4.0]])[[0, 2]]
    y = combine(out, torch.tensor([[0.5, 9.0], [1.0, 9.0]]), torch.tensor([0, 2, 1, 2]))
    assert torch.equal(y, torch.tensor([[0.5, 1.0], [3.0, 4.0]]))


def test_combine_adds_slots_in_order_and_accumulates_in_fp32():
    out = torch.tensor([[1e8], [1.0], [-1e8]])
    y = combine(out, torch.ones(1, 3), torch.tensor([0, 1, 2]))
    assert y.item() == (torch.tensor(1e8) + 1.0 - 1e8).item()
    half = combine(
        torch.ones(3, 1, dtype=torch.bfloat16) / 256,
        torch.full((1, 3), 1.0),
        torch.tensor([0, 1, 2]),
    )
    assert half.dtype == torch.bfloat16 and half.item() == pytest.approx(3 / 256)


def test_non_contiguous_rows_are_read_right():
    x, ids, weights, gate_up, down = batch(9, 8, 2, 32, 16)
    strided = torch.stack((x, x + 1), dim=-1)[..., 0]
    assert not strided.is_contiguous()
    expected = reference.moe(x, ids, weights, gate_up, down)
    assert close(run_moe(GROUPED[1], strided, ids, weights, gate_up, down), expected, 2e-5)


def test_products_and_sums_are_made_in_fp32_and_rounded_once():
    out = torch.tensor([[1.0], [2.0**-8], [2.0**-8]], dtype=torch.bfloat16)
    weights = torch.tensor([[1.0, 1.0, 1.0]])
    y = combine(out, weights, torch.tensor([0, 1, 2]))
    assert y.dtype == torch.bfloat16
    assert y.item() == 1 + 2.0**-7, "each small addend alone would be rounded away"
    out = torch.tensor([[1 + 2.0**-7], [1.0]], dtype=torch.bfloat16)
    weights = torch.tensor([[1 + 2.0**-7, -(1 + 2.0**-6)]])
    small = combine(out, weights, torch.tensor([0, 1])).item()
    assert small == 2.0**-14, "products are not rounded to the rows' format"


@pytest.mark.parametrize("wrong", [0, -3, 2.0, True, None, "5"])
def test_a_number_of_experts_that_is_no_positive_whole_number_is_refused(wrong):
    with pytest.raises(KernelError, match=r"^num_physical \(.*\) must be a whole number above 0.$"):
        permute(torch.tensor([[0, 0]]), wrong)


def test_ids_that_have_no_values_or_are_no_tensor_are_refused():
    for ids, said in (
        (torch.zeros(2, 2, dtype=torch.int64, device="meta"), r"^phy_ids_TK \(2, 2\) .* on meta"),
        ([[0, 1]], "^phy_ids_TK is of type list but must be a torch tensor"),
        (None, "^phy_ids_TK is of type NoneType"),
        (torch.tensor([[0, 1]]).to_sparse(), "has the layout torch.sparse_coo but must be dense"),
    ):
        with pytest.raises(KernelError, match=said):
            permute(ids, 5)


def test_a_huge_id_is_refused_before_anything_is_sized_by_it(monkeypatch):
    def counted(*_, **__):
        raise AssertionError("counts were made first")

    monkeypatch.setattr(np, "bincount", counted)
    with pytest.raises(KernelError, match="holds the id 3000000000"):
        permute(torch.tensor([[3_000_000_000, 0]]), 5)


def test_row_r_adds_nothing_however_many_rows_there_are():
    out = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    for num_rows in range(1, 5):
        row_of = torch.tensor([num_rows, 0, num_rows, num_rows])
        y = combine(out[:num_rows], torch.ones(2, 2), row_of)
        assert y.tolist() == [[1.0], [0.0]]
    assert combine(out[:0], torch.ones(1, 2), torch.tensor([0, 0])).tolist() == [[0.0]]


OUT, WEIGHTS, ROW_OF = torch.zeros(4, 8), torch.zeros(2, 2), torch.tensor([0, 1, 2, 3])
UNCOMBINED = [
    (OUT, WEIGHTS, ROW_OF - 1, r"^row_of_N \(4,\) int64 holds the row -1 but out_RD \(4, 8\)"),
    (OUT, WEIGHTS, ROW_OF + 2, r"^row_of_N \(4,\) int64 holds the row 5 .* allows 0 to 4.$"),
    (OUT[:2], WEIGHTS, ROW_OF, "holds the row 3 .* allows 0 to 2"),
    (OUT, WEIGHTS, ROW_OF.int(), r"^row_of_N is \(4,\) int32 but must be one of int64"),
    (OUT, WEIGHTS, ROW_OF.float(), "^row_of_N is .* float32 but must be one of int64"),
    (OUT, WEIGHTS, ROW_OF.view(2, 2), r"^row_of_N is \(2, 2\) int64 but must have the axes"),
    (OUT, WEIGHTS, ROW_OF[1:], r"^row_of_N is \(3,\) .* must be \(4,\) to fit weights_TK \(2, 2\)"),
    (OUT, WEIGHTS[:, :0], ROW_OF[:0], r"^weights_TK is \(2, 0\) float32 but K must be at least 1"),
    (OUT, WEIGHTS[0], ROW_OF, "^weights_TK is .* must have the axes"),
    (OUT, WEIGHTS.half(), ROW_OF, "^weights_TK is .* float16 but must be one of float32"),
    (OUT.int(), WEIGHTS, ROW_OF, "^out_RD is .* int32 but must be one of float32, bfloat16"),
    (OUT[0], WEIGHTS, ROW_OF, "^out_RD is .* must have the axes"),
    (OUT.to("meta"), WEIGHTS, ROW_OF, "one device, but here: out_RD on meta, weights_TK on cpu"),
    (OUT, WEIGHTS, ROW_OF.to("meta"), "one device, but here: .* row_of_N on meta"),
    (OUT, WEIGHTS, ROW_OF.tolist(), "^row_of_N is of type list but must be a torch tensor"),
    (None, WEIGHTS, ROW_OF, "^out_RD is of type NoneType"),
    (OUT.to("meta"), WEIGHTS.to("meta"), ROW_OF.to("meta"), "^row_of_N .* lies on meta, where"),
]


@pytest.mark.parametrize(("out", "weights", "row_of", "said"), UNCOMBINED)
def test_what_combine_cannot_add_up_is_refused_in_one_sentence(out, weights, row_of, said):
    with pytest.raises(KernelError, match=said) as caught:
        combine(out, weights, row_of)
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)
