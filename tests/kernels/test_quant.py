"""Quantising by torch: the grid, the bound on the error, and rows that are hard to scale."""

from __future__ import annotations

import pytest
import torch

from engine.errors import KernelError
from engine.kernels import quant, reference
from tests.numerics import close

BOUND = {"int8": 0.5 / 127, "e4m3": 2.0**-4}
"""Error over the row's largest magnitude, and for e4m3 over the value itself where it is normal."""


def restored(x, name):
    values, scales = quant.quantise_rows(x, name)
    return values.double() * scales.double().unsqueeze(-1)


def rows(dtype=torch.float32):
    return torch.randn(20, 48, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_a_small_row_is_that_of_the_docstring():
    values, scales = quant.quantise_rows(torch.tensor([[1.0, -2.0, 0.5]]), "int8")
    assert values.tolist() == [[64, -127, 32]]
    assert scales.item() == pytest.approx(0.01575, abs=1e-5)


@pytest.mark.parametrize("name", ["int8", "e4m3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_the_nearest_on_the_oracles_grid(name, dtype):
    x = rows(dtype)
    values, scales = quant.quantise_rows(x, name)

    def distance(scales_R):
        return (values.double() * scales_R.double().unsqueeze(-1) - x.double()).abs()

    # Distances, not values: what lies halfway may go either way.
    nearest = (reference.quantised(x, name) - x.double()).abs()
    assert close(distance(scales), nearest, 1e-4)
    assert not close(torch.zeros_like(nearest), nearest, 1e-4), "the grid is coarser than the row"
    assert not close(distance(scales.roll(1)), nearest, 1e-4), "a stale scale is seen"


@pytest.mark.parametrize("name", ["int8", "e4m3"])
def test_the_error_stays_within_the_stated_bound(name):
    x = rows().double()
    peak = x.abs().amax(-1, keepdim=True)
    error = (restored(x.float(), name) - x).abs()
    unit = peak if name == "int8" else torch.maximum(x.abs(), peak / 448 * 2.0**-6)
    assert (error <= unit * BOUND[name] * (1 + 1e-6)).all()
    assert (error > unit * BOUND[name] * 0.8).any(), "the bound is not far above the error"


@pytest.mark.parametrize("name", ["int8", "e4m3"])
def test_zeros_stay_zero_and_tiny_and_huge_rows_keep_their_size(name):
    x = rows()[:4]
    x[0] = 0
    x[1] *= 1e-30
    x[2] *= 6e4
    x[3] *= 1e-42
    values, scales = quant.quantise_rows(x, name)
    assert (values[0].float() == 0).all()
    assert torch.isfinite(scales).all() and (scales > 0).all()
    for row in (1, 2):
        assert close(restored(x[row : row + 1], name), x[row : row + 1], 0.1)
    assert (restored(x[3:], name).abs() <= x[3].abs().max() + quant.SMALLEST_SCALE).all()


@pytest.mark.parametrize("name", ["int8", "e4m3"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_never_looks_finite(name, bad):
    x = rows()[:2]
    x[0, 3] = bad
    back = restored(x, name)
    assert torch.isnan(back[0]).all() and torch.isfinite(back[1]).all()


@pytest.mark.parametrize("name", ["int8", "e4m3"])
def test_weights_have_one_scale_an_output_channel(name):
    weights = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(1))
    weights[1, 2] = 0
    weights[2, 5] *= 1e3
    stack = quant.quantise_weights(weights, name)
    assert stack.values.shape == (3, 8, 16) and stack.scales.shape == (3, 8)
    assert (stack.values[1, 2].float() == 0).all()
    for expert in range(3):
        for channel in range(8):
            one = reference.quantised(weights[expert, channel], name)
            assert torch.allclose(stack.dequantised()[expert, channel].double(), one, rtol=1e-6)


def test_experts_come_back_as_what_their_values_stand_for():
    gate_up, down = torch.randn(2, 12, 8), torch.randn(2, 8, 6)
    experts = quant.quantise_experts(gate_up, down, "int8")
    assert experts.format == "int8"
    back = experts.dequantised()
    assert close(back[0], gate_up, 0.02) and close(back[1], down, 0.02)
    assert quant.quantise_experts(gate_up, down, "e4m3").format == "e4m3"


def test_a_small_token_beside_a_large_one_keeps_its_relative_error():
    x = rows()[:2]
    x[1] = x[0].roll(1) / 1000
    for row in range(2):
        error = (restored(x, "int8")[row] - x[row]).norm() / x[row].norm()
        assert error < 0.02


@pytest.mark.parametrize("name", ["int8", "e4m3"])
def test_no_rows_are_no_rows(name):
    values, scales = quant.quantise_rows(torch.empty(0, 16, dtype=torch.bfloat16), name)
    assert values.shape == (0, 16) and scales.shape == (0,)


def test_what_cannot_be_quantised_is_named():
    with pytest.raises(KernelError, match=r"format \('int4'\) must be one of int8, e4m3"):
        quant.quantise_rows(torch.zeros(2, 4), "int4")
    with pytest.raises(KernelError, match=r"x_RD is \(4,\) float32 but must have the axes \(R, D"):
        quant.quantise_rows(torch.zeros(4), "int8")
    broken = torch.zeros(2, 4, 4)
    broken[1, 2, 3] = float("nan")
    with pytest.raises(KernelError, match=r"\(2, 4, 4\) float32 holds 1 values that are NaN"):
        quant.quantise_weights(broken, "int8")
    with pytest.raises(KernelError, match=r"down is \(2, 4, 3\) .* must be \(2, 4, 2\)"):
        quant.quantise_experts(torch.zeros(2, 4, 4), torch.zeros(2, 4, 3), "int8")


@pytest.mark.parametrize("name", ["int8", "e4m3"])
def test_rows_without_columns_are_refused_in_one_sentence(name):
    with pytest.raises(KernelError, match=r"^x_RD is \(3, 0\) float32 but its last axis must hold"):
        quant.quantise_rows(torch.zeros(3, 0), name)
    with pytest.raises(KernelError, match=r"^weights_EOI is \(2, 3, 0\) float32 but its last axis"):
        quant.quantise_weights(torch.zeros(2, 3, 0), name)


@pytest.mark.parametrize("wrong", [None, 8, ["int8"], torch.int8])
def test_a_format_that_is_no_name_is_refused(wrong):
    with pytest.raises(KernelError, match=r"^format \(.*\) must be one of int8, e4m3.$"):
        quant.quantise_rows(torch.zeros(2, 4), wrong)
    with pytest.raises(KernelError, match="must be one of int8, e4m3.$"):
        quant.quantise_weights(torch.zeros(2, 4, 4), wrong)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ([[1.0]], "is of type list but must be a torch tensor"),
        (None, "is of type NoneType"),
        (torch.zeros(2, 4).numpy(), "is of type ndarray"),
        (torch.zeros(2, 4).to_sparse(), "has the layout torch.sparse_coo but must be dense"),
    ],
)
def test_what_is_no_dense_tensor_is_refused_in_one_sentence(wrong, said):
    with pytest.raises(KernelError, match=f"^x_RD .*{said}"):
        quant.quantise_rows(wrong, "int8")
    with pytest.raises(KernelError, match=f"^weights_EOI .*{said}"):
        quant.quantise_weights(wrong, "int8")


def test_weights_of_whole_numbers_or_without_values_are_refused():
    with pytest.raises(KernelError, match="^weights_EOI is .* int64 but must be one of float32"):
        quant.quantise_weights(torch.zeros(1, 2, 2, dtype=torch.int64), "int8")
    with pytest.raises(KernelError, match="^weights_EOI .* lies on meta"):
        quant.quantise_weights(torch.zeros(1, 2, 2, device="meta"), "int8")
