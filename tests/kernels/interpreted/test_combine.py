"""The Triton combine adds as torch does, bit for bit, whatever the other rows are."""

from __future__ import annotations

import pytest
import torch

from engine.errors import KernelError
from engine.kernels import combine as twin
from engine.kernels.gpu import combine as ours

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def batch(tokens, k, width, dtype=torch.float32):
    generator = torch.Generator().manual_seed(tokens + width)
    rows = torch.randn(tokens * k, width, generator=generator).to(dtype)
    weights = torch.rand(tokens, k, generator=generator)
    row_of = torch.randperm(tokens * k, generator=generator)
    return rows, weights, row_of


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "k", "width"), [(1, 1, 16), (7, 3, 37), (5, 8, 40), (3, 2, 1030)]
)
def test_the_sum_is_bitwise_that_of_torch(dtype, tokens, k, width):
    rows, weights, row_of = batch(tokens, k, width, dtype)
    y = ours.combine(rows, weights, row_of)
    assert y.dtype == dtype
    assert torch.equal(y, twin.combine(rows, weights, row_of))


def test_the_check_fails_for_another_order_of_adding():
    rows, weights, row_of = batch(6, 8, 40)
    backwards = row_of.view(6, 8).flip(1).reshape(-1)
    y = ours.combine(rows, weights, row_of)
    assert not torch.equal(y, ours.combine(rows, weights.flip(1), backwards))
    fused = torch.zeros(6, 40, dtype=torch.float64)
    for slot in range(8):
        fused += rows[row_of.view(6, 8)[:, slot]].double() * weights[:, slot, None].double()
        fused = fused.float().double()
    assert not torch.equal(y, fused.float()), "one rounding for a product and its sum would show"


def test_a_row_is_bitwise_the_same_whatever_stands_beside_it():
    rows, weights, row_of = batch(9, 3, 24, torch.bfloat16)
    together = ours.combine(rows, weights, row_of)
    for token in range(9):
        alone = ours.combine(rows, weights[token : token + 1], row_of[3 * token : 3 * token + 3])
        assert torch.equal(alone[0], together[token])


def test_pairs_without_a_row_add_nothing_and_poison_past_the_end_is_not_read():
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [float("inf"), float("nan")]])
    weights = torch.tensor([[0.5, 9.0], [1.0, 9.0]])
    row_of = torch.tensor([0, 2, 1, 2])
    y = ours.combine(rows, weights, row_of, num_rows=torch.tensor([2]))
    assert torch.equal(y, torch.tensor([[0.5, 1.0], [3.0, 4.0]]))
    assert torch.equal(y, twin.combine(rows[:2], weights, row_of))


def test_the_sum_is_fp32_and_rounded_once():
    rows = torch.tensor([[1.0], [2.0**-8], [2.0**-8]], dtype=torch.bfloat16)
    y = ours.combine(rows, torch.ones(1, 3), torch.tensor([0, 1, 2]))
    assert y.item() == 1 + 2.0**-7, "each small addend alone would be rounded away"


def test_strided_rows_and_weights_are_read_right():
    rows, weights, row_of = batch(6, 2, 20)
    wide = torch.full((12, 33), float("nan"))
    wide[:, 4:24] = rows
    strided = weights.t().contiguous().t()
    y = ours.combine(wide[:, 4:24], strided, row_of)
    assert torch.equal(y, twin.combine(rows, weights, row_of))


def test_no_tokens_give_no_rows_in_the_right_format(monkeypatch):
    monkeypatch.setattr(ours, "_combine", None)
    empty = torch.empty(0, 16, dtype=torch.bfloat16)
    y = ours.combine(empty, torch.empty(0, 4), torch.empty(0, dtype=torch.int64))
    assert y.shape == (0, 16) and y.dtype == torch.bfloat16


def test_wrong_arguments_are_named():
    rows, weights, row_of = batch(6, 2, 20)
    with pytest.raises(
        KernelError, match=r"row_of_N is \(11,\) .* must be \(12,\) int64 to fit weights"
    ):
        ours.combine(rows, weights, row_of[:-1].contiguous())
    with pytest.raises(KernelError, match=r"out_RD \(12, 20\) float32 has stride 2"):
        ours.combine(torch.zeros(12, 40)[:, ::2], weights, row_of)
    with pytest.raises(KernelError, match=r"out_RD is \(12, 20\) int8"):
        ours.combine(rows.to(torch.int8), weights, row_of)


def test_a_negative_row_and_one_past_the_memory_add_nothing():
    memory = torch.full((5, 2), float("nan"))
    memory[1:3] = rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    weights = torch.tensor([[0.5, 9.0, 1.0], [1.0, 9.0, 9.0]])
    row_of = torch.tensor([0, -1, 1, 1, 2, -1])
    expected = torch.tensor([[3.5, 5.0], [3.0, 4.0]])
    assert torch.equal(ours.combine(memory[1:3], weights, row_of), expected)
    too_many = torch.tensor([4])
    assert torch.equal(ours.combine(memory[1:3], weights, row_of, num_rows=too_many), expected)
    assert torch.equal(ours.combine(rows, weights, row_of, num_rows=torch.tensor([2])), expected)


def test_memory_to_write_to_rows_and_their_number_must_fit():
    rows, weights, row_of = batch(6, 2, 20)
    given = torch.empty(6, 20)
    assert ours.combine(rows, weights, row_of, out=given) is given
    assert torch.equal(given, twin.combine(rows, weights, row_of))
    for out, match in (
        (
            torch.empty(5, 20),
            r"out is \(5, 20\) float32 but must be \(6, 20\) .* out_RD \(12, 20\)",
        ),
        (torch.empty(6, 19), r"out is \(6, 19\) float32 but must be \(6, 20\)"),
        (torch.empty(6, 20, dtype=torch.float16), r"out is .*float16 but must be .* float32"),
        (torch.empty(20, 6).t(), r"out \(6, 20\) float32 has strides \(1, 6\)"),
        (torch.empty(6, 20, device="meta"), r"one device.*out on meta"),
    ):
        with pytest.raises(KernelError, match=match):
            ours.combine(rows, weights, row_of, out=out)
    for wrong in (row_of.int(), row_of.view(6, 2), row_of.repeat(2), row_of.double()):
        with pytest.raises(KernelError, match=r"row_of_N is .* but must be \(12,\) int64"):
            ours.combine(rows, weights, wrong)
    for number in (torch.tensor(3), torch.tensor([3, 3]), torch.tensor([3]).int()):
        with pytest.raises(KernelError, match=r"num_rows is .* but must be \(1,\) int64"):
            ours.combine(rows, weights, row_of, num_rows=number)
