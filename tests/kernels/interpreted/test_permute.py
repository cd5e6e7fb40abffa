"""The Triton permutation: order, blocks and counts are bit for bit those of loops and of torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import KernelError
from engine.kernels import permute as twin
from engine.kernels import reference
from engine.kernels.gpu import permute as ours

WAYS = ("quadratic", "chunks")


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """Count every pair against every other, or by chunks as for many pairs."""
    if request.param == "chunks":
        monkeypatch.setattr(ours, "QUADRATIC_PAIRS", 0)
    return request.param


def agrees(ids, num_experts, block_rows, format_rows=16):
    """Whether everything equals the loops' and torch's answer; unused entries are poisoned."""
    out = ours.empty_permutation(
        ids.numel(), num_experts, block_rows, "cpu", format_rows=format_rows
    )
    if ids.numel():
        for array in (out.source_N, out.row_of_N, out.block_row_B, out.block_unit_B):
            array.fill_(2**30)
        out.tally.fill_(-7)
        out.chunk_counts.fill_(2**30)
    ours.permute(ids, num_experts, block_rows, format_rows=format_rows, out=out)
    tokens, row_of, blocks = reference.permutation(ids, num_experts, block_rows, format_rows)
    by_torch = twin.permute(ids.long(), num_experts)
    num_rows = len(tokens)
    used = out.block_expert_B[: len(blocks)].tolist()
    found = zip(used, out.block_row_B.tolist(), out.block_unit_B.tolist(), strict=False)
    return (
        out.source_N[:num_rows].tolist() == tokens == by_torch.source_R.tolist()
        and out.row_of_N.tolist() == row_of == by_torch.row_of_N.tolist()
        and out.counts_P.tolist() == list(by_torch.counts)
        and out.offsets.tolist() == [sum(by_torch.counts[:e]) for e in range(num_experts + 1)]
        and list(found) == blocks
        and (out.block_expert_B[len(blocks) :] == -1).all().item()
        and int(out.bad_ids) == 0
        and int(out.num_rows) == num_rows
    )


def random_ids(tokens, experts, k, *, skip=0.0, skew=0.0):
    generator = torch.Generator().manual_seed(tokens * 31 + experts)
    scores = torch.rand(tokens, experts, generator=generator)
    scores -= skew * torch.arange(experts) / experts
    ids = scores.argsort(1, descending=True)[:, :k]
    return ids.masked_fill(torch.rand(tokens, k, generator=generator) < skip, -1)


def test_a_small_batch_is_that_of_the_docstring(way):
    out = ours.permute(torch.tensor([[1, 0], [1, -1]]), 2, 16)
    assert out.source_N[:3].tolist() == [0, 0, 1]
    assert out.row_of_N.tolist() == [1, 0, 2, 3]
    assert out.offsets.tolist() == [0, 1, 3]
    assert out.block_expert_B.tolist() == [0, 1] and out.block_row_B.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("tokens", "experts", "k", "options"),
    [
        (1, 1, 1, {}),
        (1, 8, 8, {}),
        (19, 5, 5, {}),
        (25, 60, 4, {"skip": 0.2}),
        (70, 3, 2, {"skew": 3.0}),
        (20, 257, 3, {"skip": 1.0}),
    ],
)
def test_every_array_equals_the_loops_and_torch(way, tokens, experts, k, options):
    ids = random_ids(tokens, experts, k, **options)
    assert agrees(ids, experts, 16)
    assert agrees(ids.int(), experts, 32, format_rows=8)


def test_all_tokens_on_one_expert_fill_block_after_block(way):
    ids = torch.zeros(70, 1, dtype=torch.int64)
    assert agrees(ids, 8, 16)
    out = ours.permute(ids, 8, 16)
    assert out.block_row_B[:5].tolist() == [0, 16, 32, 48, 64]
    assert out.block_expert_B.tolist() == [0] * 5 + [-1] * 6


def test_no_tokens_give_no_rows_and_launch_nothing(way, monkeypatch):
    for kernel in ("permute_quadratic", "count_chunks", "map_blocks"):
        monkeypatch.setattr(ours, kernel, None)
    out = ours.permute(torch.empty(0, 4, dtype=torch.int64), 8, 16)
    assert out.source_N.numel() == out.block_expert_B.numel() == 0
    assert out.counts_P.tolist() == [0] * 8 and out.offsets.tolist() == [0] * 9


def test_ids_of_any_strides_are_read_right(way):
    ids = random_ids(23, 7, 3)
    assert agrees(ids.t().contiguous().t(), 7, 16)
    wide = torch.full((23, 5), 99)
    wide[:, 1:4] = ids
    assert agrees(wide[:, 1:4], 7, 16)


def test_the_check_fails_for_other_ids(way):
    ids = random_ids(23, 7, 3)
    other = ids.clone()
    other[5, 0], other[5, 1] = ids[5, 1], ids[5, 0]
    out, wrong = ours.permute(ids, 7, 16), ours.permute(other, 7, 16)
    assert torch.equal(out.source_N, wrong.source_N), "a swap of slots moves no token"
    assert not torch.equal(out.row_of_N, wrong.row_of_N)
    assert torch.equal(out.row_of_N, twin.permute(ids, 7).row_of_N)


def test_ids_of_no_expert_are_skipped_and_counted(way):
    ids = torch.tensor([[0, 3], [-2, 1], [7, -1]])
    out = ours.permute(ids, 3, 16)
    assert int(out.bad_ids) == 3
    assert out.counts_P.tolist() == [1, 1, 0] and out.row_of_N.tolist() == [0, 2, 2, 1, 2, 2]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_ids_agree_on_both_ways(data):
    experts, k = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 4))
    row = st.lists(st.integers(-1, experts - 1), min_size=k, max_size=k)
    rows = data.draw(st.lists(row, max_size=40))
    ids = torch.tensor(rows, dtype=torch.int64).view(len(rows), k)
    block_rows, format_rows = data.draw(st.sampled_from([(4, 4), (8, 2), (16, 16)]))
    before = ours.QUADRATIC_PAIRS
    try:
        for limit in (before, 0):
            ours.QUADRATIC_PAIRS = limit
            assert agrees(ids, experts, block_rows, format_rows)
    finally:
        ours.QUADRATIC_PAIRS = before


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.sampled_from([1, 4, 16]))
def test_no_load_needs_more_blocks_than_the_bound(counts, block_rows):
    needed = sum(-(-count // block_rows) for count in counts)
    assert needed <= ours.num_blocks_bound(sum(counts), len(counts), block_rows)


def test_the_bound_is_reached():
    assert ours.num_blocks_bound(5, 3, 4) == 3
    assert ours.num_blocks_bound(8, 64, 16) == 8
    assert ours.num_blocks_bound(0, 64, 16) == 0


def test_the_shared_expert_is_one_more_that_every_token_takes():
    ids, weights = ours.append_shared(torch.tensor([[1, 0]]), torch.tensor([[0.7, 0.3]]), 2)
    assert ids.tolist() == [[1, 0, 2]]
    assert torch.equal(weights, torch.tensor([[0.7, 0.3, 1.0]]))


def test_wrong_arguments_are_named():
    with pytest.raises(KernelError, match=r"ids_TK is \(4,\) int64 but must have the axes \(T, K"):
        ours.permute(torch.zeros(4, dtype=torch.int64), 2, 16)
    with pytest.raises(KernelError, match=r"ids_TK is \(4, 2\) float32 but must be one of int64"):
        ours.permute(torch.zeros(4, 2), 2, 16)
    with pytest.raises(KernelError, match=r"block_rows \(24\) must be a power of two"):
        ours.permute(torch.zeros(4, 2, dtype=torch.int64), 2, 24)
    with pytest.raises(KernelError, match=r"block_rows \(8\) must be a multiple of format_rows"):
        ours.permute(torch.zeros(4, 2, dtype=torch.int64), 2, 8)


def test_memory_of_another_size_is_refused():
    ids = torch.tensor([[1, 0], [1, -1]])
    for sizes, match in (
        (
            (6, 2, 16),
            r"out.source_N is \(6,\) int64 but must be \(4,\) int64 to fit ids_TK \(2, 2\)",
        ),
        ((3, 2, 16), r"out.source_N is \(3,\) int64 but must be \(4,\)"),
        ((4, 3, 16), r"out has num_physical 3 but the call asks for 2"),
        ((4, 2, 32), r"out has block_rows 32 but the call asks for 16"),
    ):
        with pytest.raises(KernelError, match=match):
            ours.permute(ids, 2, 16, out=ours.empty_permutation(*sizes, "cpu"))
    fits = ours.empty_permutation(4, 2, 16, "cpu")
    with pytest.raises(KernelError, match=r"out has format_rows 16 but the call asks for 8"):
        ours.permute(ids, 2, 16, format_rows=8, out=fits)
    with pytest.raises(KernelError, match=r"out.offsets is \(3,\) int32 but must be \(3,\) int64"):
        ours.permute(ids, 2, 16, out=replace(fits, offsets=fits.offsets.int()))
    with pytest.raises(KernelError, match=r"out.row_of_N \(4,\) int64 has strides \(2,\)"):
        ours.permute(ids, 2, 16, out=replace(fits, row_of_N=torch.zeros(8).long()[::2]))
    with pytest.raises(KernelError, match=r"one device.*out.tally on meta"):
        ours.permute(ids, 2, 16, out=replace(fits, tally=fits.tally.to("meta")))


def test_no_tokens_leave_no_rows_in_used_memory(way):
    out = ours.empty_permutation(0, 3, 16, "cpu")
    out.offsets.fill_(5)
    out.tally.fill_(5)
    found = ours.permute(torch.empty(0, 2, dtype=torch.int64), 3, 16, out=out)
    assert found.offsets is out.offsets and found.num_tokens == 0
    assert out.offsets.tolist() == [0] * 4 and out.counts_P.tolist() == [0] * 3
    assert int(found.num_rows) == int(found.bad_ids) == 0
    with pytest.raises(KernelError, match=r"out.source_N is \(4,\) int64 but must be \(0,\)"):
        ours.permute(torch.empty(0, 2).long(), 3, 16, out=ours.empty_permutation(4, 3, 16, "cpu"))


def test_sizes_below_the_least_are_named():
    ids = torch.tensor([[1, 0]])
    with pytest.raises(KernelError, match=r"num_pairs \(-2\) must be 0 or more"):
        ours.empty_permutation(-2, 4, 16, "cpu")
    for num_physical in (-1, 0):
        with pytest.raises(
            KernelError, match=rf"num_physical \({num_physical}\) must be 1 or more"
        ):
            ours.permute(ids, num_physical, 16)
        with pytest.raises(
            KernelError, match=rf"num_physical \({num_physical}\) must be 1 or more"
        ):
            ours.append_shared(ids, torch.ones(1, 2), num_physical)
    with pytest.raises(KernelError, match=r"num_shared \(-1\) must be 0 or more"):
        ours.append_shared(ids, torch.ones(1, 2), 2, num_shared=-1)
    for size in ((1, 3), (2, 2)):
        with pytest.raises(KernelError, match=r"weights_TK is .* must be \(1, 2\) to fit ids_TK"):
            ours.append_shared(ids, torch.ones(size), 2)
