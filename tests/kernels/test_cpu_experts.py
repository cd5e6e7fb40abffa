"""The CPU's layouts of the experts: int8 within its bound, windows that never leak, one owner."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from engine.errors import KernelError
from engine.kernels import cpu_experts, grouped_gemm, onednn, reference, tiled
from engine.kernels.experts import ExpertWeights
from engine.kernels.permute import permute
from engine.kernels.ways import Plan
from tests.numerics import close

WAYS = {
    "columns": (cpu_experts.columns_mlp, cpu_experts.prepare_columns),
    "packed": (cpu_experts.packed_mlp, cpu_experts.prepare_packed),
    "int8": (cpu_experts.int8_mlp, cpu_experts.prepare_int8),
}
ALL = WAYS | {"torch": (grouped_gemm.grouped_mlp, None), "tiled": (tiled.grouped_mlp, None)}
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
    [250, 6, 1, 256, 0],
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
        for _, window, own in cpu_experts._windows(counts, range(len(counts)), sum(counts))
        for row in range(window.start, window.stop)[own]
    ]
    assert rows == list(range(sum(counts)))


def test_runs_are_those_of_the_docstring_and_hold_each_row_once():
    seen = []

    def mlp(rows, counts, experts):
        assert len(rows) == sum(counts)
        seen.append((list(counts), list(experts)))
        return rows

    rows = torch.arange(601.0)[:, None]
    out = cpu_experts._by_runs(mlp, rows, [1, 0, 200, 100, 300], [4, 3, 2, 1, 0])
    assert seen == [([1, 200], [4, 2]), ([100], [1]), ([300], [0])]
    assert torch.equal(out, rows)


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


def test_few_rows_take_the_way_that_the_plan_names_and_many_the_other(monkeypatch):
    for dtype in (torch.float32, torch.bfloat16):
        gate_up, down = stacks(dtype=dtype)
        monkeypatch.setattr(cpu_experts.ways, "fixed", lambda *_: Plan("packed", "columns", 5))
        weights = ExpertWeights(gate_up.clone(), down.clone(), cpu_experts.prepare_packed)
        own = weights.num_bytes
        weights.refresh()
        columns = 0 if dtype == torch.float32 else 2
        assert weights.num_bytes == (2 + columns) * own, "the weights, packed, and by columns"
        taken = []

        def told(name, product, taken=taken):
            return lambda x: (taken.append((name, len(x))), product(x))[1]

        weights.prepared = [
            tuple(m._replace(few=told("few", m.few), product=told("all", m.product)) for m in pair)
            for pair in weights.prepared
        ]
        rows = torch.randn(17, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
        counts, experts = [1, 4, 0, 5, 7], [0, 1, 2, 3, 4]
        out = cpu_experts.packed_mlp(rows, counts, experts, weights)
        assert close(out, exact(rows, counts, experts, gate_up, down), 3e-2)
        assert taken == 2 * [("few", 1), ("few", 4), ("all", 5), ("all", 7)]


@pytest.mark.parametrize(("factor", "same"), [(1.0, True), (2.0**-20, False), (2.0**20, False)])
def test_weights_that_fp16_would_cut_are_not_multiplied_in_it(monkeypatch, factor, same):
    gate_up, down = stacks(dtype=torch.bfloat16)
    half = Plan("packed", "half", 9)
    monkeypatch.setattr(cpu_experts.trials, "plan", lambda *_: half)
    stack = gate_up * factor
    assert (cpu_experts._plan(stack, measure=True) is half) == same
    weights = ExpertWeights(stack, down, partial(cpu_experts.prepare_packed, measure=True))
    rows = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    out = cpu_experts.packed_mlp(rows, [3], [1], weights)
    assert close(out, exact(rows, [3], [1], stack, down), 3e-2)


def test_columns_change_strides_but_neither_values_nor_shape():
    gate_up, down = stacks()
    weights = ExpertWeights(gate_up.clone(), down.clone(), cpu_experts.prepare_columns)
    weights.refresh()
    assert torch.equal(weights.gate_up, gate_up) and torch.equal(weights.down, down)
    assert weights.gate_up.stride() != gate_up.stride()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("way", ALL)
def test_weights_that_are_not_finite_are_refused_when_they_are_refreshed(way, bad):
    for which, name in enumerate(("gate_up", "down")):
        pair = stacks()
        weights = ExpertWeights(*pair, ALL[way][1])
        weights.refresh()
        pair[which][1, 2, 3] = bad
        with pytest.raises(KernelError, match=f"^{name} .* holds 1 values that are NaN"):
            weights.refresh()


def test_finite_weights_whose_sum_is_not_are_taken():
    gate_up, down = stacks()
    gate_up.fill_(3e38)
    ExpertWeights(gate_up, down).refresh()


@pytest.mark.parametrize("way", ALL)
def test_stacks_that_do_not_fit_are_refused_before_any_kernel_sees_them(way):
    gate_up, down = stacks()
    for wrong, said in (
        ((gate_up, down[..., 1:]), r"^down is \(5, 64, 47\) float32 but must be \(5, 64, 48\)"),
        ((gate_up[:, 1:], down), r"^gate_up is \(5, 95, 64\) .* 2F, must be even"),
        ((gate_up[..., :0], down[:, :0]), r"^gate_up is \(5, 96, 0\) .* 2F and D, must be above 0"),
        ((gate_up[:, :0], down[..., :0]), r"^gate_up is \(5, 0, 64\) .* 2F and D, must be above 0"),
        ((gate_up, down.bfloat16()), r"^down is .* bfloat16 but must have the format of gate_up"),
        ((gate_up.long(), down.long()), r"^gate_up is .* int64 but must be one of float32"),
        ((gate_up.double(), down.double()), r"^gate_up is .* float64 but must be one of float32"),
        ((gate_up, down.to("meta")), "must lie on one device"),
        ((gate_up.numpy(), down), "^gate_up is of type ndarray but must be a torch tensor"),
        ((gate_up, None), "^down is of type NoneType but must be a torch tensor"),
        ((gate_up.to_sparse(), down), "^gate_up .* has the layout torch.sparse_coo but must be"),
    ):
        with pytest.raises(KernelError, match=said):
            ExpertWeights(*wrong, ALL[way][1])


def test_the_packed_layout_refuses_fp16_and_every_layout_refuses_meta():
    gate_up, down = stacks(dtype=torch.float16)
    with pytest.raises(KernelError, match="float16 but must be one of float32, bfloat16"):
        ExpertWeights(gate_up, down, cpu_experts.prepare_packed).refresh()
    for _, prepare in ALL.values():
        with pytest.raises(KernelError, match=r"^gate_up \(5, 96, 64\) .* lies on meta"):
            ExpertWeights(gate_up.to("meta"), down.to("meta"), prepare).refresh()


ROWS = torch.zeros(6, 64)
MISFITS = [
    (ROWS, [1, 1, 1, 1, 1], [0, 1, 2, 3, 4], r"^counts sum to 5, .* rows_RD \(6, 64\) float32"),
    (ROWS, [2, 2, 2, 2, 2], [0, 1, 2, 3, 4], "^counts sum to 10"),
    (ROWS, [7, -1, 0, 0, 0], [0, 1, 2, 3, 4], "^counts sum to 6, the least is -1, but must"),
    (ROWS, [], [], "^counts sum to 0"),
    (ROWS, [6], [0, 1], "^counts has 1 groups but experts 2"),
    (ROWS, [6], [5], r"^experts holds 5 but gate_up \(5, 96, 64\) float32 allows 0 to 4"),
    (ROWS, [3, 3], [0, -1], "^experts holds -1 but gate_up"),
    (ROWS, [6, 0], [0, 9], "^experts holds 9 but gate_up"),
    (ROWS, [6.0], [0], r"^counts \(\[6.0\]\) must be a list of whole numbers"),
    (ROWS, [6], [0.0], "^experts .* must be a list of whole numbers"),
    (ROWS, torch.tensor([6]), [0], "^counts .* must be a list of whole numbers"),
    (ROWS, [6], None, "^experts .* must be a list of whole numbers"),
    (ROWS.bfloat16(), [6], [0], r"^rows_RD is \(6, 64\) bfloat16 but must have the format of gate"),
    (ROWS.half(), [6], [0], "^rows_RD is .* float16 but must have the format of gate_up"),
    (ROWS.double(), [6], [0], "^rows_RD is .* float64 but must be one of float32"),
    (ROWS.long(), [6], [0], "^rows_RD is .* int64 but must be one of float32"),
    (ROWS[:, 1:], [6], [0], r"^rows_RD is \(6, 63\) .* gate_up \(5, 96, 64\) .* width 64"),
    (ROWS[0], [64], [0], r"^rows_RD is \(64,\) float32 but must have the axes"),
    (ROWS.to("meta"), [6], [0], "must lie on one device, but here: rows_RD on meta"),
    (ROWS.to_sparse(), [6], [0], "^rows_RD .* has the layout torch.sparse_coo"),
    (ROWS.numpy(), [6], [0], "^rows_RD is of type ndarray but must be a torch tensor"),
]


@pytest.mark.parametrize(("rows", "counts", "experts", "said"), MISFITS)
@pytest.mark.parametrize("way", ALL)
def test_rows_counts_and_experts_that_do_not_fit_are_refused_in_one_sentence(
    way, rows, counts, experts, said
):
    fn, prepare = ALL[way]
    with pytest.raises(KernelError, match=said) as caught:
        fn(rows, counts, experts, ExpertWeights(*stacks(), prepare))
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


@pytest.mark.parametrize("way", ALL)
def test_rows_for_weights_on_meta_are_refused_in_one_sentence(way):
    fn, prepare = ALL[way]
    weights = ExpertWeights(*(stack.to("meta") for stack in stacks()), prepare)
    with pytest.raises(KernelError, match="one device, but here: rows_RD on cpu, gate_up on meta"):
        fn(ROWS, [6], [0], weights)
    with pytest.raises(KernelError, match="^gate_up .* lies on meta, where nothing has values"):
        fn(ROWS.to("meta"), [6], [0], weights)


@pytest.mark.parametrize("way", WAYS)
def test_who_waits_for_a_gradient_is_told_that_there_is_none(way):
    fn, prepare = WAYS[way]
    pair = stacks()
    weights = ExpertWeights(*pair, prepare)
    for name, tensor in (("rows_RD", ROWS.clone()), ("gate_up", pair[0]), ("down", pair[1])):
        tensor.requires_grad_(True)
        rows = tensor if name == "rows_RD" else ROWS
        with pytest.raises(KernelError, match=rf"^{name} .* requires a gradient but this .*\.$"):
            fn(rows, [6], [0], weights)
        with torch.no_grad():
            assert fn(rows, [6], [0], weights).shape == ROWS.shape
        tensor.requires_grad_(False)


def test_no_tokens_give_no_rows_in_every_way():
    ids = torch.zeros(0, 2, dtype=torch.int64)
    _, _, counts = permute(ids, 5)
    gate_up, down = stacks()
    for way in WAYS:
        out = run(way, torch.zeros(0, 64), counts, [0, 1, 2, 3, 4], gate_up, down)
        assert out.shape == (0, 64) and out.dtype == torch.float32
