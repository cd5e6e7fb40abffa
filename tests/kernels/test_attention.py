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
