"""Both formats in one call: each row as if all had its format, skipped rows not run, bad input."""

from __future__ import annotations

import pytest
import torch

from engine.errors import KernelError
from engine.kernels import cpu_mixed
from engine.kernels.cpu_experts import int8_mlp, packed_mlp, prepare_int8, prepare_packed
from engine.kernels.cpu_mixed import mixed_mlp, prepare_mixed
from engine.kernels.experts import ExpertWeights
from engine.kernels.quant import INT8, NATIVE, SKIP
from tests.kernels.test_cpu_experts import stacks

COUNTS = [
    [1, 0, 0, 0, 0],
    [0, 0, 0, 0, 2],
    [1, 17, 4, 0, 1],
    [0, 33, 0, 0, 0],
    [0, 0, 0, 0, 0],
    [5, 9, 16, 65, 2],
    [250, 6, 1, 256, 0],
]
PATTERNS = {
    "flapping": lambda rows: torch.arange(rows) % 2,
    "units of 16": lambda rows: torch.arange(rows) // 16 % 2,
    "one in int8": lambda rows: (torch.arange(rows) == rows // 2).long(),
    "all but one in int8": lambda rows: (torch.arange(rows) != rows // 2).long(),
    "at random": lambda rows: torch.randint(0, 2, (rows,)),
}
EXPERTS = [4, 1, 2, 3, 0]


def made(prepare, dtype=torch.bfloat16, **shape):
    gate_up, down = stacks(dtype=dtype, **shape)
    weights = ExpertWeights(gate_up, down, prepare)
    weights.refresh()
    return weights


def rows_of(count, dtype=torch.bfloat16, width=64):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_is_bitwise_what_it_is_when_all_rows_have_its_format(dtype, counts):
    torch.manual_seed(0)
    both, rows = made(prepare_mixed, dtype), rows_of(sum(counts), dtype)
    own = packed_mlp(rows, counts, EXPERTS, made(prepare_packed, dtype))
    int8 = int8_mlp(rows, counts, EXPERTS, made(prepare_int8, dtype))
    assert torch.equal(mixed_mlp(rows, counts, EXPERTS, both), own)
    for name, pattern in PATTERNS.items():
        formats = pattern(len(rows)).to(torch.int8)
        out = mixed_mlp(rows, counts, EXPERTS, both, formats)
        wanted = torch.where((formats == INT8)[:, None], int8, own)
        assert torch.equal(out, wanted), name
    if len(rows) > 1:
        assert not torch.equal(own, int8), "the two formats differ, so a mix-up would be seen"


def test_the_check_above_sees_one_row_in_the_wrong_format_and_swapped_experts():
    both, rows, counts = made(prepare_mixed), rows_of(40), [8, 8, 8, 8, 8]
    formats = torch.arange(40).remainder(2).to(torch.int8)
    right = mixed_mlp(rows, counts, EXPERTS, both, formats)
    wrong = formats.clone()
    wrong[7] = NATIVE
    differs = (mixed_mlp(rows, counts, EXPERTS, both, wrong) != right).any(dim=1)
    assert differs.nonzero().ravel().tolist() == [7]
    swapped = mixed_mlp(rows, counts, [1, 4, 2, 3, 0], both, formats)
    assert (swapped != right).any(dim=1)[:16].all()


def test_skipped_rows_are_not_run(monkeypatch):
    ran = []

    def counting(rows, counts, experts, weights):
        ran.append(list(counts))
        return packed_mlp(rows, counts, experts, weights)

    both, rows, counts = made(prepare_mixed), rows_of(100), [40, 0, 20, 30, 10]
    whole = mixed_mlp(rows, counts, EXPERTS, both)
    monkeypatch.setattr(cpu_mixed, "packed_mlp", counting)
    formats = torch.full((100,), SKIP, dtype=torch.int8)
    formats[44:56] = NATIVE
    out = mixed_mlp(rows, counts, EXPERTS, both, formats)
    assert ran == [[0, 0, 12, 0, 0]], "no other expert ran, and no other row of this one"
    assert torch.equal(out[44:56], whole[44:56])


def test_zero_blocks_and_extreme_rows_stay_within_their_bound():
    gate_up, down = stacks(dtype=torch.bfloat16)
    gate_up[0, :32] = 0
    gate_up[1, 5] = 0
    down[2, :16] = 1e-30
    gate_up[3, 7] = 6e4
    weights = ExpertWeights(gate_up, down, prepare_mixed)
    weights.refresh()
    rows = rows_of(30)
    rows[[3, 20]] = 0
    formats = torch.full((30,), INT8, dtype=torch.int8)
    formats[::5] = NATIVE
    out = mixed_mlp(rows, [6, 6, 6, 6, 6], [0, 1, 2, 3, 4], weights, formats)
    assert torch.isfinite(out).all()
    assert not out[[3, 20]].any(), "a token of zeros stays zeros"


def test_a_small_token_beside_a_large_one_keeps_its_relative_error():
    both, rows = (
        made(prepare_mixed, torch.float32, width=256, inner=256),
        rows_of(2, torch.float32, width=256),
    )
    rows[1] = rows[0] / 1000
    int8 = torch.full((2,), INT8, dtype=torch.int8)
    exact = mixed_mlp(rows, [2, 0, 0, 0, 0], EXPERTS, both)
    out = mixed_mlp(rows, [2, 0, 0, 0, 0], EXPERTS, both, int8)
    error = (out - exact).norm(dim=1) / exact.norm(dim=1)
    assert error[1] < 1.2 * error[0] < 0.03, error


@pytest.mark.parametrize(
    ("formats", "words"),
    [
        (torch.zeros(9, dtype=torch.int8), r"\(10,\)"),
        (torch.zeros(10, dtype=torch.int64), "int8"),
        (torch.full((10,), 2, dtype=torch.int8), "allowed are -1"),
        (torch.full((10,), -2, dtype=torch.int8), "allowed are -1"),
    ],
)
def test_formats_that_do_not_fit_are_refused(formats, words):
    with pytest.raises(KernelError, match=words):
        mixed_mlp(rows_of(10), [2, 2, 2, 2, 2], EXPERTS, made(prepare_mixed), formats)
