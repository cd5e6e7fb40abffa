"""The experts' two launches, held against the plain oracle in every scheme and format."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.errors import KernelError
from engine.kernels import quant, reference
from engine.kernels.gpu import grouped_gemm as ours
from engine.kernels.gpu.combine import combine
from engine.kernels.gpu.experts import ONE_BYTE, ExpertStack, empty_scratch
from engine.kernels.gpu.permute import empty_permutation, num_blocks_bound, permute
from engine.kernels.gpu.tiles import SCHEMES, Tile, TileChoice
from tests.numerics import close

BOTH = {"w8a8": "int8", "e4m3": "e4m3", "mixed_int8": "int8", "mixed_e4m3": "e4m3"}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
TILE = Tile(tokens=16, features=16, depth=32, num_warps=4, num_stages=2, group=2)
TILES = TileChoice(TILE, replace(TILE, features=32), "small, for the interpreter")


class Batch:
    """Random tokens, ids and experts of one shape, and what the product makes of them."""

    def __init__(self, tokens, experts, k, width, inner, *, dtype=torch.float32, loads="random"):
        generator = torch.Generator().manual_seed(tokens * 1000 + experts)
        self.x = torch.randn(tokens, width, generator=generator).to(dtype)
        scores = torch.rand(tokens, experts, generator=generator)
        if loads == "skewed":
            scores -= 2 * torch.arange(experts) / experts
        self.ids = scores.argsort(1, descending=True)[:, :k]
        if loads == "one":
            self.ids = torch.zeros_like(self.ids)
        if loads == "skip":
            self.ids[::3, 0] = -1
        self.weights = torch.rand(tokens, k, generator=generator)
        gate_up = torch.randn(experts, 2 * inner, width, generator=generator) * width**-0.5
        down = torch.randn(experts, width, inner, generator=generator) * inner**-0.5
        self.gate_up, self.down = gate_up.to(dtype), down.to(dtype)

    def stack(self, scheme):
        name = ONE_BYTE.get(scheme)
        one_byte = quant.quantise_experts(self.gate_up, self.down, name) if name else None
        native = scheme in ("native", "mixed_int8", "mixed_e4m3")
        return ExpertStack(
            scheme=scheme,
            gate_up=self.gate_up if native else None,
            down=self.down if native else None,
            quantised=one_byte,
        )

    def run(self, stack, *, formats=None, format_rows=16, ids=None, weights=None, x=None):
        """Permute, multiply and combine; all memory not yet written is NaN."""
        ids = self.ids if ids is None else ids
        x = self.x if x is None else x
        permutation = permute(ids, stack.num_experts, 16, format_rows=format_rows)
        scratch = empty_scratch(len(x), ids.numel(), stack, x.dtype, "cpu")
        scratch.inner_NF.fill_(float("nan"))
        scratch.out_ND.fill_(float("nan"))
        if formats is not None:  # for every unit that any ids could need; 77 is no format
            most = num_blocks_bound(ids.numel(), stack.num_experts, format_rows)
            formats = torch.nn.functional.pad(formats, (0, most - len(formats)), value=77)
        out = ours.grouped_mlp(
            x, permutation, stack, tiles=TILES, formats_U=formats, scratch=scratch
        )
        weights = self.weights if weights is None else weights
        return combine(out, weights, permutation.row_of_N, num_rows=permutation.num_rows)

    def expected(self, scheme, formats=None, format_rows=16):
        if scheme == "native":
            return reference.moe(self.x, self.ids, self.weights, self.gate_up, self.down)
        if scheme == "w8a16":
            gate_up, down = (reference.quantised(w, "int8") for w in (self.gate_up, self.down))
            return reference.moe(self.x, self.ids, self.weights, gate_up, down)
        by_pair = [[BOTH[scheme]] * self.ids.shape[1]] * len(self.ids)
        if formats is not None:
            by_pair = self.formats_of_pairs(BOTH[scheme], formats, format_rows)
        return reference.moe_by_format(
            self.x, self.ids, self.weights, self.gate_up, self.down, by_pair
        )

    def formats_of_pairs(self, name, formats, format_rows):
        """Say, by the loops' rows and units, which format each pair has."""
        experts = len(self.gate_up)
        _, row_of, units = reference.permutation(self.ids, experts, format_rows, format_rows)
        starts = [row for _, row, _ in units]
        pairs = []
        for row, expert in zip(row_of, self.ids.flatten().tolist(), strict=True):
            if expert < 0:
                pairs.append(None)
                continue
            unit = max(index for index, start in enumerate(starts) if start <= row)
            pairs.append(name if formats[unit] == quant.FORMATS[name] else None)
        k = self.ids.shape[1]
        return [pairs[at : at + k] for at in range(0, len(pairs), k)]

    def num_units(self, format_rows):
        return len(reference.permutation(self.ids, len(self.gate_up), format_rows, format_rows)[2])


SHAPES = [
    (1, 8, 2, 32, 16, "random"),
    (5, 8, 1, 32, 16, "one"),
    (17, 5, 5, 48, 24, "random"),
    (9, 60, 4, 32, 16, "random"),
    (40, 6, 2, 40, 20, "skewed"),
    (12, 7, 2, 32, 16, "skip"),
    (7, 1, 1, 32, 16, "random"),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_native_experts_equal_the_oracle(shape):
    batch = Batch(*shape[:-1], loads=shape[-1])
    y = batch.run(batch.stack("native"))
    assert y.dtype == batch.x.dtype
    assert close(y, batch.expected("native"), 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_formats_equal_the_oracle(dtype):
    batch = Batch(17, 5, 3, 48, 24, dtype=dtype, loads="skip")
    y = batch.run(batch.stack("native"))
    assert y.dtype == dtype
    assert close(y, batch.expected("native"), TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("scheme", "dtype", "tolerance"),
    [
        ("w8a8", torch.float32, 1e-5),
        ("w8a16", torch.float32, 1e-5),
        ("e4m3", torch.float32, 1e-5),
        # An inner value one bf16 step beside the oracle's may fall on the next number of the grid.
        ("w8a8", torch.bfloat16, 4e-2),
        ("w8a16", torch.bfloat16, 2e-2),
        ("e4m3", torch.bfloat16, 8e-2),
    ],
)
def test_experts_in_one_byte_equal_the_oracle_of_their_format(scheme, dtype, tolerance):
    batch = Batch(17, 5, 2, 48, 24, dtype=dtype, loads="skip")
    y = batch.run(batch.stack(scheme))
    assert close(y, batch.expected(scheme), tolerance)
    assert not close(y, batch.expected("native"), tolerance), "the wrong format is seen"


@pytest.mark.parametrize("scheme", ["mixed_int8", "mixed_e4m3"])
@pytest.mark.parametrize("format_rows", [16, 8])
def test_blocks_of_both_formats_in_one_call_equal_the_oracle(scheme, format_rows):
    batch = Batch(30, 4, 2, 48, 24, loads="skewed")
    units = batch.num_units(format_rows)
    pattern = torch.randint(0, 2, (units,), generator=torch.Generator().manual_seed(1))
    assert 0 < pattern.sum() < units
    formats = (pattern * quant.FORMATS[BOTH[scheme]]).to(torch.int8)
    y = batch.run(batch.stack(scheme), formats=formats, format_rows=format_rows)
    assert close(y, batch.expected(scheme, formats.tolist(), format_rows), 1e-5)
    wrong = (quant.FORMATS[BOTH[scheme]] - formats).tolist()
    assert not close(y, batch.expected(scheme, wrong, format_rows), 1e-5), "formats are told apart"
    late = formats.roll(1).tolist()
    assert not close(y, batch.expected(scheme, late, format_rows), 1e-5), "one unit off is seen"


def test_a_partial_unit_at_the_end_of_an_expert_keeps_its_own_format():
    batch = Batch(21, 2, 1, 32, 16)
    batch.ids = (torch.arange(21) >= 19).long().unsqueeze(1)  # 19 rows: 16 and 3; then 2
    for pattern in ([0, 1, 0], [1, 0, 1]):
        formats = torch.tensor(pattern, dtype=torch.int8)
        y = batch.run(batch.stack("mixed_int8"), formats=formats)
        expected = batch.expected("mixed_int8", pattern)
        assert close(y, expected, 1e-5)
        for rows in (slice(0, 16), slice(16, 19), slice(19, 21)):
            assert close(y[rows], expected[rows], 1e-5)


def test_the_oracle_check_fails_for_wrong_experts_tokens_and_weights():
    batch = Batch(17, 5, 2, 48, 24)
    expected = batch.expected("native")
    assert close(batch.run(batch.stack("native")), expected, 1e-5)
    swapped = batch.gate_up.clone()
    swapped[[0, 1]] = batch.gate_up[[1, 0]]
    other = ExpertStack(scheme="native", gate_up=swapped, down=batch.down)
    assert not close(batch.run(other), expected, 1e-5), "two experts swapped"
    dropped = batch.ids.clone()
    dropped[4, 1] = -1
    assert not close(batch.run(batch.stack("native"), ids=dropped), expected, 1e-5)
    normal = batch.weights / batch.weights.sum(1, keepdim=True)
    assert not close(batch.run(batch.stack("native"), weights=normal), expected, 1e-5)
    assert not close(torch.zeros_like(expected), expected, 1e-5), "nothing at all"


def test_the_oracle_check_fails_for_a_stale_scale():
    batch = Batch(17, 5, 2, 48, 24)
    stack = batch.stack("w8a8")
    assert close(batch.run(stack), batch.expected("w8a8"), 1e-5)
    gate_up = stack.quantised.gate_up
    stale = replace(stack.quantised, gate_up=replace(gate_up, scales=gate_up.scales.roll(1, 0)))
    assert not close(batch.run(replace(stack, quantised=stale)), batch.expected("w8a8"), 1e-2)


def test_a_replica_uses_its_experts_weights():
    batch = Batch(20, 4, 2, 32, 16)
    once = batch.run(batch.stack("native"))
    replicated = torch.where((batch.ids == 1) & (torch.arange(20) % 2 == 0)[:, None], 4, batch.ids)
    permutation = permute(replicated, 5, 16)
    out = ours.grouped_mlp(
        batch.x,
        permutation,
        batch.stack("native"),
        tiles=TILES,
        stack_of_P=torch.tensor([0, 1, 2, 3, 1]),
    )
    twice = combine(out, batch.weights, permutation.row_of_N)
    assert torch.equal(once, twice)


def test_a_token_without_experts_may_be_poison():
    batch = Batch(12, 4, 2, 32, 16)
    batch.ids[3] = -1
    expected = batch.run(batch.stack("w8a8"))
    poisoned = batch.x.clone()
    poisoned[3, ::2], poisoned[3, 1::2] = float("nan"), float("inf")
    assert torch.equal(batch.run(batch.stack("w8a8"), x=poisoned), expected)
    assert torch.isfinite(expected).all() and (expected[3] == 0).all()


def test_a_broken_token_is_broken_in_the_result_and_no_other_is():
    batch = Batch(6, 4, 1, 32, 16)
    batch.x[2, 5] = float("nan")
    for scheme in ("native", "w8a8"):
        y = batch.run(batch.stack(scheme))
        assert torch.isnan(y[2]).all(), "never a plausible number"
        assert torch.isfinite(y[[0, 1, 3, 4, 5]]).all()


def test_strided_tokens_are_read_right():
    batch = Batch(9, 4, 2, 32, 16)
    wide = torch.full((9, 50), float("nan"))
    wide[:, 7:39] = batch.x
    for scheme in ("native", "w8a8", "w8a16"):
        stack = batch.stack(scheme)
        assert torch.equal(batch.run(stack, x=wide[:, 7:39]), batch.run(stack))


def test_zeros_tiny_and_huge_weights_stay_within_the_bound_of_their_format():
    batch = Batch(8, 3, 1, 32, 16)
    batch.gate_up[0] = 0
    batch.down[1, 3] = 0
    batch.down[1, 4] *= 1e-30
    batch.down[2] *= 6e4
    batch.x[5] = 0
    batch.ids = torch.tensor([[0], [1], [2], [0], [1], [1], [2], [2]])
    for scheme in ("w8a8", "w8a16", "e4m3"):
        y, expected = batch.run(batch.stack(scheme)), batch.expected(scheme)
        assert torch.isfinite(y).all()
        assert (y[batch.ids[:, 0] == 0] == 0).all() and (y[:, 3][batch.ids[:, 0] == 1] == 0).all()
        assert (y[5] == 0).all()
        for expert in (1, 2):
            rows = (batch.ids[:, 0] == expert) & (torch.arange(8) != 5)
            assert close(y[rows][:, 5:], expected[rows][:, 5:], 1e-4)
        assert close(y[rows := torch.tensor([1, 4])][:, 4], expected[rows][:, 4], 1e-4)


def test_a_token_a_thousand_times_smaller_keeps_its_relative_error():
    batch = Batch(2, 2, 1, 64, 32)
    batch.x[1] = batch.x[0].roll(3) / 1000
    batch.ids = torch.zeros(2, 1, dtype=torch.int64)
    y, exact = batch.run(batch.stack("w8a8")), batch.expected("native")
    for token in range(2):
        error = (y[token].double() - exact[token]).norm() / exact[token].norm()
        assert error < 0.02


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_tokens_launch_nothing(scheme, monkeypatch):
    batch = Batch(0, 8, 2, 32, 16, dtype=torch.bfloat16)
    monkeypatch.setattr(ours, "grouped_product", None)
    formats = torch.empty(0, dtype=torch.int8) if scheme.startswith("mixed") else None
    y = batch.run(batch.stack(scheme), formats=formats)
    assert y.shape == (0, 32) and y.dtype == torch.bfloat16


def refused(match, **changes):
    batch = Batch(6, 4, 2, 32, 16)
    given = {
        "x_TD": batch.x,
        "permutation": permute(batch.ids, 4, 16),
        "experts": batch.stack("native"),
        "tiles": TILES,
    }
    with pytest.raises(KernelError, match=match):
        ours.grouped_mlp(**given | changes)


def test_arguments_that_do_not_fit_are_named_with_both_shapes():
    batch = Batch(6, 4, 2, 32, 16)
    stack = batch.stack("native")
    refused(r"x_TD is \(6, 20\) float32 but gate_up \(4, 32, 32\) float32", x_TD=batch.x[:, :20])
    refused(r"x_TD is \(6, 32\) bfloat16 but gate_up is .*float32", x_TD=batch.x.bfloat16())
    refused(r"x_TD \(6, 32\) float32 has stride 6", x_TD=batch.x.t().contiguous().t())
    refused(r"over 5 experts but gate_up is \(4, 32", permutation=permute(batch.ids, 5, 16))
    refused(r"blocks of 32 rows but the tiles take 16", permutation=permute(batch.ids, 4, 32))
    refused(r"takes no formats_U", formats_U=torch.zeros(4, dtype=torch.int8))
    refused(r"mixed_int8 needs formats_U", experts=batch.stack("mixed_int8"))
    refused(r"stack_of_P is \(3,\) int64 but must be \(4,\)", stack_of_P=torch.arange(3))
    with pytest.raises(KernelError, match=r"down is \(4, 32, 15\) .* \(4, 32, 16\) to fit gate_up"):
        ExpertStack(scheme="native", gate_up=stack.gate_up, down=stack.down[..., :15])
    with pytest.raises(KernelError, match=r"scheme \('int4'\) must be one of native, w8a8"):
        ExpertStack(scheme="int4")
    with pytest.raises(KernelError, match=r"scheme w8a8 needs quantised weights \(int8\)"):
        ExpertStack(scheme="w8a8")


def test_tokens_must_be_those_that_were_permuted():
    batch = Batch(6, 4, 2, 32, 16)
    refused(r"x_TD is \(3, 32\) float32 but the permutation is of 6 tokens", x_TD=batch.x[:3])
    refused(r"x_TD is \(0, 32\) float32 but the permutation is of 6 tokens", x_TD=batch.x[:0])
    refused(r"is of None tokens", permutation=empty_permutation(12, 4, 16, "cpu"))


def test_formats_and_places_in_the_stack_must_fit_the_permutation():
    batch = Batch(6, 4, 2, 32, 16)
    mixed = batch.stack("mixed_int8")
    for formats, match in (
        (torch.zeros(3, dtype=torch.int8), r"is \(3,\) int8 but must be \(4,\) or more to fit 12"),
        (torch.zeros(4, dtype=torch.int32), r"formats_U is \(4,\) int32 but must be one of int8"),
        (torch.zeros(4, 1, dtype=torch.int8), r"formats_U is \(4, 1\) int8 .* axes \(U\)"),
        (torch.zeros(8, dtype=torch.int8)[::2], r"formats_U \(4,\) int8 has strides \(2,\)"),
    ):
        refused(match, experts=mixed, formats_U=formats)
    for places, match in (
        (torch.zeros(4), r"stack_of_P is \(4,\) float32 but must be one of int64, int32"),
        (torch.zeros(5, dtype=torch.int64), r"stack_of_P is \(5,\) int64 but must be \(4,\)"),
        (torch.zeros(8, dtype=torch.int64)[::2], r"stack_of_P \(4,\) int64 has strides"),
        (torch.tensor([0, 1, 2, 4]), r"holds the place 4 but gate_up \(4, 32, 32\).* 0 to 3"),
        (torch.tensor([0, -1, 2, 3]), r"holds the place -1"),
    ):
        refused(match, stack_of_P=places)


def test_scratch_of_other_sizes_and_scales_that_do_not_fit_are_refused():
    batch = Batch(6, 4, 2, 32, 16)
    native, one_byte = batch.stack("native"), batch.stack("w8a8")
    empty, f32 = empty_scratch, torch.float32
    refused(
        r"scratch.inner_NF is \(11, 16\) float32 but must be \(12, 16\) .* to fit x_TD \(6, 32\)",
        scratch=empty(6, 11, native, f32, "cpu"),
    )
    refused(r"inner_NF is .*bfloat16", scratch=empty(6, 12, native, torch.bfloat16, "cpu"))
    good = empty(6, 12, one_byte, f32, "cpu")
    for change, match in (
        ({"out_ND": torch.empty(32, 12).t()}, r"scratch.out_ND \(12, 32\) .* strides \(1, 12\)"),
        ({"tokens": None}, r"scratch.tokens is None but scheme w8a8 needs it"),
        (
            {"tokens": (good.tokens[0][:5], good.tokens[1])},
            r"scratch.tokens\[0\] is \(5, 32\) int8",
        ),
        ({"rows": (good.rows[0], good.rows[1][:5])}, r"scratch.rows\[1\] is \(5,\) float32"),
        ({"inner_NF": good.inner_NF.to("meta")}, r"one device.*scratch.inner_NF on meta"),
    ):
        refused(match, experts=one_byte, scratch=good._replace(**change))
    gate_up = one_byte.quantised.gate_up
    strided = gate_up.scales.t().contiguous().t()
    for scales, match in (
        (strided, r"quantised.gate_up.scales \(4, 32\) float32 has strides"),
        (gate_up.scales.double(), r"quantised.gate_up.scales is \(4, 32\) float64 .* float32"),
        (
            gate_up.scales[:3],
            r"quantised.gate_up.scales is \(3, 32\) float32 but must be \(4, 32\)",
        ),
    ):
        wrong = replace(one_byte.quantised, gate_up=replace(gate_up, scales=scales))
        with pytest.raises(KernelError, match=match):
            replace(one_byte, quantised=wrong)
