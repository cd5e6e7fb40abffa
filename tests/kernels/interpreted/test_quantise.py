"""The Triton quantisation is that of torch, bit for bit, also for rows that are hard to scale."""

from __future__ import annotations

import pytest
import torch

from engine.errors import KernelError
from engine.kernels import quant as twin
from engine.kernels.gpu import quant as ours

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def hard_rows(width, dtype):
    """Zeros, tiny, huge, subnormal, one large value among small ones, NaN and infinity."""
    x = torch.randn(9, width, generator=torch.Generator().manual_seed(width))
    x[0] = 0
    x[1] *= 1e-30
    x[2] *= 6e4 / x[2].abs().max()
    x[3] *= 1e-42
    x[4, 1] = 1000.0
    x[5, 0] = float("nan")
    x[6, width - 1] = float("-inf")
    return x.to(dtype)


def same(actual, expected):
    return torch.equal(actual[0].float(), expected[0].float()) and torch.equal(
        actual[1].nan_to_num(-1.0, posinf=-2.0), expected[1].nan_to_num(-1.0, posinf=-2.0)
    )


@pytest.mark.parametrize("name", ["int8", "e4m3"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 37, 200])
def test_values_and_scales_are_bitwise_those_of_torch(name, dtype, width):
    x = hard_rows(width, dtype)
    actual = ours.quantise_rows(x, name)
    assert actual[0].dtype == ours.DTYPES[name]
    assert same(actual, twin.quantise_rows(x, name))


def test_the_check_fails_for_another_rows_scale():
    x = hard_rows(37, torch.float32)
    values, scales = twin.quantise_rows(x, "int8")
    assert not same(ours.quantise_rows(x, "int8"), (values, scales.roll(1)))
    assert not same(ours.quantise_rows(x, "int8"), (values.roll(1, 0), scales))


def test_rows_from_the_given_number_on_are_neither_read_nor_written():
    x = hard_rows(16, torch.float32)
    out = torch.full((9, 16), 77, dtype=torch.int8), torch.full((9,), 7.5)
    ours.quantise_rows(x, "int8", num_rows=torch.tensor([4]), out=out)
    values, scales = twin.quantise_rows(x[:4], "int8")
    assert torch.equal(out[0][:4], values) and torch.equal(out[1][:4], scales)
    assert (out[0][4:] == 77).all() and (out[1][4:] == 7.5).all()


def test_strided_rows_are_read_right():
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    assert same(ours.quantise_rows(x[:, 3:20], "int8"), twin.quantise_rows(x[:, 3:20], "int8"))


@pytest.mark.parametrize("name", ["int8", "e4m3"])
def test_no_rows_launch_nothing(name, monkeypatch):
    monkeypatch.setattr(ours, "_quantise_rows", None)
    values, scales = ours.quantise_rows(torch.empty(0, 16, dtype=torch.bfloat16), name)
    assert values.shape == (0, 16) and scales.shape == (0,)


def test_wrong_arguments_are_named():
    with pytest.raises(KernelError, match=r"format \('int4'\) must be one of int8, e4m3"):
        ours.quantise_rows(torch.zeros(2, 16), "int4")
    with pytest.raises(KernelError, match=r"x_RD is \(2, 40000\) float32 but rows may be 32768"):
        ours.quantise_rows(torch.zeros(2, 40000), "int8")
    with pytest.raises(KernelError, match=r"x_RD is \(2, 16\) int64"):
        ours.quantise_rows(torch.zeros(2, 16, dtype=torch.int64), "int8")


def test_memory_to_write_to_and_the_number_of_rows_must_fit():
    x = torch.ones(3, 16)
    values, scales = torch.empty(3, 16, dtype=torch.int8), torch.empty(3)
    assert same(ours.quantise_rows(x, "int8", out=(values, scales)), twin.quantise_rows(x, "int8"))
    for out, match in (
        ((values[:2], scales), r"out\[0\] is \(2, 16\) int8 but must be \(3, 16\) int8 .* x_RD"),
        ((values.view(torch.uint8), scales), r"out\[0\] is \(3, 16\) uint8"),
        ((torch.empty(16, 3).to(torch.int8).t(), scales), r"out\[0\] .* has strides \(1, 3\)"),
        ((values, scales[:2]), r"out\[1\] is \(2,\) float32 but must be \(3,\) float32"),
        ((values, scales.double()), r"out\[1\] is \(3,\) float64"),
        ((values, torch.empty(6)[::2]), r"out\[1\] .* has strides \(2,\)"),
        ((values, scales.to("meta")), r"one device.*scales on meta"),
    ):
        with pytest.raises(KernelError, match=match):
            ours.quantise_rows(x, "int8", out=out)
    for number in (torch.tensor(2), torch.tensor([2, 2]), torch.tensor([2]).int()):
        with pytest.raises(KernelError, match=r"num_rows is .* but must be \(1,\) int64"):
            ours.quantise_rows(x, "int8", num_rows=number)
    with pytest.raises(KernelError, match=r"one device.*num_rows on meta"):
        ours.quantise_rows(x, "int8", num_rows=torch.tensor([2], device="meta"))
