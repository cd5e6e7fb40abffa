"""Attention over the paged cache, held against the plain oracle."""

from __future__ import annotations

import pytest
import torch

from engine.kernels import dense, reference, tiled
from engine.kernels.attention import Segment, paged_attention, plan_attention
from tests.numerics import close

PATHS = (paged_attention, tiled.paged_attention)


def cache_of(sequences, block_size, kv_heads, head_dim, seed=0):
    """Lay random sequences into shuffled blocks; all other slots hold garbage."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-length // block_size) for length in sequences]
    blocks = iter((torch.randperm(sum(needed), generator=generator) + 1).tolist())
    shape = (sum(needed) + 1, block_size, kv_heads, head_dim)
    keys, values = (torch.full(shape, 1e4) for _ in range(2))
    keys[0] = values[0] = 0
    tables, plain = [], []
    for length, count in zip(sequences, needed, strict=True):
        table = tuple(next(blocks) for _ in range(count))
        k, v = (torch.randn(length, kv_heads, head_dim, generator=generator) for _ in range(2))
        for position in range(length):
            block, offset = table[position // block_size], position % block_size
            keys[block, offset], values[block, offset] = k[position], v[position]
        tables.append(table)
        plain.append((k, v))
    return keys, values, tables, plain


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("block_size", [16, 5])
def test_prefills_and_decodes_equal_the_oracle(path, heads, block_size):
    num_heads, kv_heads = heads
    lengths, starts = [1, 7, 70, 130, 33, 17], [0, 0, 69, 40, 0, 16]
    keys, values, tables, plain = cache_of(lengths, block_size, kv_heads, 16)
    segments, positions, row = [], [], 0
    for length, start, table in zip(lengths, starts, tables, strict=True):
        segments.append(Segment(row, length - start, start, table))
        positions.append(range(start, length))
        row += length - start
    q = torch.randn(row, num_heads, 16, generator=torch.Generator().manual_seed(1))
    out = path(q, keys, values, plan_attention(segments, block_size, torch.device("cpu")))
    for segment, (k, v), at in zip(segments, plain, positions, strict=True):
        rows = slice(segment.first_row, segment.first_row + segment.num_rows)
        assert close(out[rows], reference.attention(q[rows], k, v, at), 2e-5)


def test_the_layout_of_decodes_is_that_of_the_docstring():
    plan = plan_attention(
        [Segment(0, 1, 5, (2, 5)), Segment(1, 1, 2, (3,))], 4, torch.device("cpu")
    ).together
    assert plan.blocks == slice(0, 6) and plan.owner_U.tolist() == [0, 0, 0, 1, 0, 0]
    assert plan.table_BM.tolist() == [[2, 5], [3, 0]] and plan.place_U.tolist() == [
        0,
        0,
        0,
        2,
        0,
        1,
    ]
    assert (~plan.unseen_BS).sum(-1).flatten().tolist() == [6, 3]


@pytest.mark.parametrize("far", [0, 500])
@pytest.mark.parametrize("by_head", [False, True])
def test_decodes_read_compact_and_scattered_blocks_alike_whatever_strangers_hold(far, by_head):
    lengths = [9, 40, 16, 1]
    keys, values, tables, plain = cache_of(lengths, 16, 2, 16)
    tables = [tuple(block + far for block in table) for table in tables]
    spread = []
    for cache in (keys, values):
        wide = torch.full((len(cache) + far + 3, *cache.shape[1:]), torch.nan)
        wide[0] = 0
        wide[1 + far : len(cache) + far] = cache[1:]
        if by_head:
            wide = wide.transpose(1, 2).contiguous().transpose(1, 2)
        spread.append(wide)
    segments = [
        Segment(i, 1, n - 1, t) for i, (n, t) in enumerate(zip(lengths, tables, strict=True))
    ]
    plan = plan_attention(segments, 16, torch.device("cpu"))
    assert isinstance(plan.together.blocks, slice) == (far == 0)
    q = torch.randn(4, 4, 16, generator=torch.Generator().manual_seed(1))
    out = paged_attention(q, *spread, plan)
    for row, (n, (k, v)) in enumerate(zip(lengths, plain, strict=True)):
        assert close(out[row : row + 1], reference.attention(q[row : row + 1], k, v, [n - 1]), 2e-5)
    q[1] = torch.nan
    ill = paged_attention(q, *spread, plan)
    assert ill[1].isnan().all(), "a broken query shows"
    assert torch.equal(ill[[0, 2, 3]], out[[0, 2, 3]]), "and stays with its own sequence"


@pytest.mark.parametrize("norm_and_rotate", [dense.norm_and_rotate, tiled.norm_and_rotate])
def test_heads_are_normed_and_rotated_as_two_by_two_rotations_say(norm_and_rotate):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 8, generator=generator)
    q_weight, k_weight = torch.rand(8, generator=generator), torch.rand(8, generator=generator) + 1
    angles = torch.arange(5)[:, None] * torch.tensor([1.0, 0.5, 0.25, 0.1])
    cos, sin = (
        torch.cat(two, 1).unsqueeze(1)
        for two in ((angles.cos(), angles.cos()), (-angles.sin(), angles.sin()))
    )
    out = norm_and_rotate(x, 2, q_weight, k_weight, 1e-5, (cos, sin))
    wanted = torch.empty(5, 3, 8, dtype=torch.float64)
    for t in range(5):
        for head, weight in enumerate((q_weight, q_weight, k_weight)):
            normed = reference.rms_norm(x[t, head], weight, 1e-5)
            for i in range(4):
                c, s = angles[t, i].double().cos(), angles[t, i].double().sin()
                wanted[t, head, i] = normed[i] * c - normed[i + 4] * s
                wanted[t, head, i + 4] = normed[i + 4] * c + normed[i] * s
    assert close(out, wanted, 1e-5)
    assert not close(norm_and_rotate(x, 1, q_weight, k_weight, 1e-5, (cos, sin)), wanted, 1e-5)
    assert not close(norm_and_rotate(x, 2, q_weight, k_weight, 1e-5, (cos, -sin)), wanted, 1e-5)


@pytest.mark.parametrize("path", PATHS)
def test_the_oracle_check_fails_when_a_key_is_missed_or_the_future_is_seen(path):
    keys, values, tables, plain = cache_of([20], 16, 4, 16)
    q = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(1))
    plan = plan_attention([Segment(0, 1, 18, tables[0])], 16, torch.device("cpu"))
    out = path(q, keys, values, plan)
    k, v = plain[0]
    assert close(out, reference.attention(q, k, v, [18]), 2e-5)
    assert not close(out, reference.attention(q, k, v, [17]), 2e-5)
    assert not close(out, reference.attention(q, k, v, [19]), 2e-5)


@pytest.mark.parametrize("norm", [dense.rms_norm, tiled.rms_norm])
@pytest.mark.parametrize("shape", [(1, 32), (17, 48), (5, 3, 16), (0, 32)])
def test_norms_equal_the_oracle(norm, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3
    weight = torch.rand(shape[-1], generator=torch.Generator().manual_seed(1)) + 0.5
    actual = norm(x, weight, 1e-5)
    assert close(actual, reference.rms_norm(x, weight, 1e-5), 1e-5)
    if x.numel():
        assert not close(actual, reference.rms_norm(x, weight, 1e-1), 1e-5)


def sharing(lengths, num_common, block_size, kv_heads):
    """Return a cache whose sequences begin with the first one's blocks, and what each sees."""
    keys, values, tables, plain = cache_of(lengths, block_size, kv_heads, 16)
    end, tables = num_common * block_size, [*tables]
    for number in range(1, len(lengths)):
        tables[number] = (*tables[0][:num_common], *tables[number][num_common:])
        plain[number] = tuple(
            torch.cat((first[:end], own[end:]))
            for first, own in zip(plain[0], plain[number], strict=True)
        )
    return keys, values, tables, plain


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize(
    ("lengths", "num_common"),
    [((40, 33, 70), 2), ((33, 33), 2), ((33, 34, 35, 60), 1), ((17, 100), 1), ((49, 40), 0)],
)
def test_decodes_that_begin_with_the_same_blocks_equal_the_oracle(path, heads, lengths, num_common):
    num_heads, kv_heads = heads
    keys, values, tables, plain = sharing(lengths, num_common, 16, kv_heads)
    segments = [
        Segment(i, 1, n - 1, t) for i, (n, t) in enumerate(zip(lengths, tables, strict=True))
    ]
    plan = plan_attention(segments, 16, torch.device("cpu"))
    assert plan.together is not None
    found = plan.together.common
    assert (0 if found is None else len(found)) == num_common
    q = torch.randn(len(lengths), num_heads, 16, generator=torch.Generator().manual_seed(1))
    out = path(q, keys, values, plan)
    for row, (length, (k, v)) in enumerate(zip(lengths, plain, strict=True)):
        wanted = reference.attention(q[row : row + 1], k, v, range(length - 1, length))
        assert close(out[row : row + 1], wanted, 2e-5)


def test_blocks_that_only_some_decodes_share_are_read_for_each_of_them():
    keys, values, tables, plain = sharing((40, 40, 40), 2, 16, 2)
    apart = cache_of((40, 40, 40), 16, 2, 16)[2][2]
    k, v = plain[2]
    for cache, rows in ((keys, k), (values, v)):
        for at, block in enumerate(apart):
            part = rows[16 * at : 16 * (at + 1)]
            cache[block, : len(part)] = part
    segments = [Segment(i, 1, 39, table) for i, table in enumerate((*tables[:2], apart))]
    plan = plan_attention(segments, 16, torch.device("cpu"))
    assert plan.together is not None and plan.together.common is None
    assert isinstance(plan.together.blocks, torch.Tensor)
    q = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(1))
    out = paged_attention(q, keys, values, plan)
    for row, (k, v) in enumerate(plain):
        wanted = reference.attention(q[row : row + 1], k, v, range(39, 40))
        assert close(out[row : row + 1], wanted, 2e-5)
