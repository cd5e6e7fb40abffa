"""Blocks are handed out clean, written where asked, and never shared."""

from __future__ import annotations

import pytest
import torch

from engine.model.kv_cache import BlockPool, KVCache


def cache():
    return KVCache(2, 6, 4, 3, 8, torch.float32)


def test_rows_land_in_the_slots_asked_for_in_their_layer_only():
    kv = cache()
    kv.clear(list(range(1, 7)))
    rows = torch.randn(3, 3, 8)
    kv.write(1, kv.places(torch.tensor([4, 6, 23])), rows, -rows)
    assert torch.equal(kv.keys[1][1, 0], rows[0]) and torch.equal(kv.keys[1][1, 2], rows[1])
    assert torch.equal(kv.values[1][5, 3], -rows[2])
    assert (kv.keys[0][1:] == 0).all() and (kv.keys[1][1, 1] == 0).all()


def test_places_are_those_of_the_docstring():
    kv = KVCache(1, 2, 4, 2, 8, torch.float32)
    assert kv.places(torch.tensor([6])).tolist() == [10, 14]


def test_the_pool_hands_out_the_lowest_blocks_so_that_those_in_use_stay_close_together():
    pool = BlockPool(6)
    pool.take(4)
    pool.give_back([3])
    pool.give_back([1])
    assert pool.take(3) == [1, 3, 5]


def test_a_cleared_block_holds_nothing_of_its_last_owner():
    kv = cache()
    kv.write(0, kv.places(torch.tensor([8])), torch.full((1, 3, 8), torch.nan), torch.ones(1, 3, 8))
    kv.clear([2])
    assert (kv.keys[0][2] == 0).all() and (kv.values[0][2] == 0).all()
    assert (kv.keys[0][0] == 0).all()


def test_the_pool_hands_out_each_block_once_and_never_block_zero():
    pool = BlockPool(5)
    first, rest = pool.take(2), pool.take(3)
    assert sorted(first + rest) == [1, 2, 3, 4, 5] and pool.num_free == 0
    pool.give_back(first)
    assert sorted(pool.take(2)) == sorted(first)
    with pytest.raises(AssertionError, match="are free"):
        pool.take(1)


def test_the_size_is_what_its_shape_takes():
    assert cache().num_bytes == 2 * 2 * 7 * 4 * 3 * 8 * 4
