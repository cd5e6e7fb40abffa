"""The CPU's layouts of the experts: int8 within its bound, windows that never leak, one owner."""

from __future__ import annotations

import pytest
import torch

from engine.errors import KernelError
from engine.kernels import cpu_experts, onednn, reference
from engine.kernels.experts import ExpertWeights
from engine.kernels.permute import permute
from tests.numerics import close

WAYS = {
    "columns": (cpu_experts.columns_mlp, cpu_experts.prepare_columns),
    "packed": (cpu_experts.packed_mlp, cpu_experts.prepare_packed),
    "int8": (cpu_experts.int8_mlp, cpu_experts.prepare_int8),
}
INT8_ERROR = 0.04
"""Of an int8 result, RMS over that of the exact one: two products of 8-bit rows and weights."""


def stacks(experts=5, width=64, inner=48, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(experts, 2 * inner, width, generator=generator) * width**-0.5
    down = torch.randn(experts, width, inner, generator=generator) * inner**-0.5
    return gate_up.to(dtype), down.to(dtype)


def exact(rows, counts, experts, gate_up, down):
    owners = [expert for n, expert in zip(counts, experts, strict=True) for _ in range(n)]
    out = [
        reference.swiglu(x.double(), gate_up[e], down[e]) for x, e in zip(rows, owners, strict=True)
    ]
    return torch.stack(out) if out else torch.zeros(0, rows.shape[1], dtype=torch.float64)


def rms_error(actual, wanted):
    return float((actual.double() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


def run(way, rows, counts, experts, gate_up, down):
    fn, prepare = WAYS[way]
    return fn(rows, counts, experts, ExpertWeights(gate_up.clone(), down.clone(), prepare))


COUNTS = [
    [1, 0, 0, 0, 0],
    [0, 0, 0, 0, 2],
    [1, 17, 4, 0, 1],
    [3, 3, 3, 3, 3],
    [0, 33, 0, 0, 0],
    [0, 0, 0, 0, 0],
    [5, 1, 1, 65, 2],
]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_equals_the_oracle_for_every_load(way, dtype, counts):
    gate_up, down = stacks(dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(sum(counts), 64, generator=generator).to(dtype)
    experts = [4, 1, 2, 3, 0]
    wanted = exact(rows, counts, experts, gate_up, down)
    actual = run(way, rows, counts, experts, gate_up, down)
    assert actual.dtype == dtype and actual.shape == rows.shape
    if not len(rows):
        return
    if way == "int8":
        assert rms_error(actual, wanted) < INT8_ERROR
    else:
        assert close(actual, wanted, 2e-5 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("way", WAYS)
def test_the_check_fails_for_swapped_experts_a_dropped_row_and_zeros(way):
    gate_up, down = stacks()
    counts, experts = [4, 5, 6, 7, 8], [0, 1, 2, 3, 4]
    rows = torch.randn(30, 64, generator=torch.Generator().manual_seed(1))
    wanted = exact(rows, counts, experts, gate_up, down)
    assert rms_error(run(way, rows, counts, experts, gate_up, down), wanted) < INT8_ERROR
    swapped = run(way, rows, counts, [1, 0, 2, 3, 4], gate_up, down)
    assert rms_error(swapped, wanted) > 5 * INT8_ERROR
    dropped = run(way, rows, [3, 6, 6, 7, 8], experts, gate_up, down)
    assert rms_error(dropped, wanted) > 2 * INT8_ERROR
    assert rms_error(torch.zeros_like(rows), wanted) == 1


@pytest.mark.parametrize("way", ["packed", "int8"])
def test_a_broken_row_stays_alone_though_windows_reach_over_neighbours(way):
    gate_up, down = stacks()
    counts, experts = [17, 17, 3, 0, 0], [0, 1, 2, 3, 4]
    rows = torch.randn(37, 64, generator=torch.Generator().manual_seed(1))
    whole = run(way, rows, counts, experts, gate_up, down)
    rows[17, 3] = torch.nan
    ill = run(way, rows, counts, experts, gate_up, down)
    assert not torch.isfinite(ill[17]).any(), "what is computed from NaN is never a number"
    others = [row for row in range(37) if row != 17]
    assert torch.equal(ill[others], whole[others])


def test_windows_are_those_of_the_docstring_and_cover_each_row_once():
    windows = list(cpu_experts._windows([1, 17, 4], [0, 1, 2], 22))
    assert [(w.start, w.stop) for _, w, _ in windows] == [(0, 1), (1, 19), (18, 22)]
    assert [(o.start, o.stop) for _, _, o in windows] == [(0, 1), (0, 17), (0, 4)]
    counts = [n % 37 for n in range(1, 200, 7)]
    rows = [
        row
        for _, window, own in cpu_experts._windows(counts, range(len(counts)), sum(counts), least=2)
        for row in range(window.start, window.stop)[own]
    ]
    assert rows == list(range(sum(counts)))


def test_row_counts_fall_into_few_size_classes_never_below_them():
    classes = {n: onednn.size_class(n) for n in range(1, 2049)}
    assert [classes[n] for n in (1, 16, 17, 33, 100)] == [1, 16, 18, 36, 104]
    assert all(n <= size <= 1.13 * n for n, size in classes.items())
    assert len(set(classes.values())) < 80


def test_a_small_token_beside_a_huge_one_keeps_its_precision_in_int8():
    gate_up, down = stacks(experts=1)
    rows = torch.randn(1, 64, generator=torch.Generator().manual_seed(1)).repeat(2, 1)
    rows[0] *= 1000
    both = run("int8", rows, [2], [0], gate_up, down)
    wanted = exact(rows, [2], [0], gate_up, down)
    assert rms_error(both[1], wanted[1]) < 0.02
    tensor_scale = rows.abs().max() / 127
    shared = (rows / tensor_scale).round() * tensor_scale
    assert rms_error(exact(shared, [2], [0], gate_up, down)[1], wanted[1]) > 0.1, (
        "one scale would not"
    )


def test_zeros_stay_zero_and_extreme_weights_stay_finite_in_int8():
    gate_up, down = stacks(experts=4)
    gate_up[0] = 0
    gate_up[1, 5] = 0
    gate_up[2] *= 1e-30
    gate_up[3] *= 6e4
    rows = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    rows[1] = 0
    counts, experts = [3, 2, 2, 2], [0, 1, 2, 3]
    out = run("int8", rows, counts, experts, gate_up, down)
    assert torch.isfinite(out).all()
    assert (out[:3] == 0).all(), "a zero expert and a zero row"
    wanted = exact(rows, counts, experts, gate_up, down)
    assert rms_error(out[3:5], wanted[3:5]) < INT8_ERROR
    assert rms_error(out[7:], wanted[7:]) < INT8_ERROR


@pytest.mark.parametrize("way", WAYS)
def test_refresh_makes_everything_anew_so_that_scales_travel_with_weights(way):
    gate_up, down = stacks()
    gate_up *= 2.0 ** torch.arange(5)[:, None, None]
    fn, prepare = WAYS[way]
    weights = ExpertWeights(gate_up.clone(), down.clone(), prepare)
    counts = [2] * 5
    rows = torch.randn(10, 64, generator=torch.Generator().manual_seed(1))
    before = fn(rows, counts, [0, 1, 2, 3, 4], weights)
    for stack in (weights.gate_up, weights.down):
        stack.copy_(stack[[3, 1, 2, 0, 4]].clone())
    weights.refresh()
    assert torch.equal(fn(rows, counts, [3, 1, 2, 0, 4], weights), before)


def test_the_owner_counts_what_it_holds():
    gate_up, down = stacks()
    own = 4 * (gate_up.numel() + down.numel())
    sizes = {}
    for way, (_, prepare) in WAYS.items():
        weights = ExpertWeights(gate_up.clone(), down.clone(), prepare)
        weights.refresh()
        sizes[way] = weights.num_bytes - own
    assert sizes == {
        "columns": 0,
        "packed": own,
        "int8": own // 4 + 4 * 5 * (96 + 64),
    }


def test_columns_change_strides_but_neither_values_nor_shape():
    gate_up, down = stacks()
    weights = ExpertWeights(gate_up.clone(), down.clone(), cpu_experts.prepare_columns)
    weights.refresh()
    assert torch.equal(weights.gate_up, gate_up) and torch.equal(weights.down, down)
    assert weights.gate_up.stride() != gate_up.stride()


def test_weights_that_are_not_finite_are_refused_in_int8_with_a_sentence():
    gate_up, down = stacks()
    gate_up[1, 2, 3] = torch.nan
    with pytest.raises(KernelError, match="weights_EOI .* holds 1 values that are NaN"):
        ExpertWeights(gate_up, down, cpu_experts.prepare_int8).refresh()


def test_stacks_that_do_not_fit_are_refused_with_both_shapes():
    gate_up, down = stacks()
    with pytest.raises(KernelError, match=r"\(5, 64, 47\)"):
        ExpertWeights(gate_up, down[..., 1:], cpu_experts.prepare_packed).refresh()


def test_no_tokens_give_no_rows_in_every_way():
    ids = torch.zeros(0, 2, dtype=torch.int64)
    _, _, counts = permute(ids, 5)
    gate_up, down = stacks()
    for way in WAYS:
        out = run(way, torch.zeros(0, 64), counts, [0, 1, 2, 3, 4], gate_up, down)
        assert out.shape == (0, 64) and out.dtype == torch.float32
