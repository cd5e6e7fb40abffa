"""Rank numbers by sorting whole-number keys, on a CPU several times as fast as torch's own ways.

A key holds a class, a number and an index, so no two are equal and any way of sorting gives the
same answer: class first, then the larger number, then the lower index. numpy sorts whole numbers
with vector instructions; torch sorts and selects (value, index) pairs one by one. Called by
`engine.kernels.topk`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

_INDEX_BITS, _NUMBER_BITS = 16, 32
_SPARE = 8
"""How many more than asked for are put on the short list."""
_PART = 1 << 15
"""Numbers that are worth a thread."""
_LARGEST = np.finfo(np.float32).max
_MAGNITUDE = 0x7FFFFFFF
"""All bits of a number but its sign."""


def best_by_keys(order_TE: Float32, count: int, class_E: Int64 | None = None) -> Int64:
    """Return (T, count) the columns of the best of each row, best first.

    Row ``[1, 3, 3, 0]`` with count 2 gives ``[1, 2]``; with class ``[1, 0, 0, 0]`` it gives
    ``[0, 1]``.

    Args:
        order_TE: (T, E) fp32 without NaN, E up to 65536; the larger the better.
        count: 1 to E.
        class_E: (E,) small whole numbers; a higher class goes first whatever its number.
    """
    columns_E = np.arange(order_TE.shape[1])
    if class_E is not None or 4 * (count + _SPARE) > len(columns_E):
        return _best(order_TE, columns_E, count, class_E)
    found: Int64 = _by_rows(lambda rows_TE: _best_of_many(rows_TE, count), order_TE)
    return found


def sum_of_best_two(order: Tensor) -> Tensor:
    """Return the sum of the two largest numbers of the last dimension, at least two long."""
    if order.device.type != "cpu":
        return order.topk(2, dim=-1).values.sum(-1)
    return torch.from_numpy(_by_rows(_best_two, order.detach().numpy()))


def _best_two(order: Float32) -> Float32:
    rising = np.sort(order, axis=-1)  # thrice as fast as to partition
    best: Float32 = rising[..., -1] + rising[..., -2]
    return best


def _by_rows(fn: Callable[[Float32], Any], numbers: Float32) -> Any:
    """Apply `fn` to many rows, a part in each thread; numpy sorts without holding up the others."""
    threads = min(torch.get_num_threads(), numbers.size // _PART, len(numbers))
    if threads < 2:
        return fn(numbers)
    first, *others = np.array_split(numbers, threads)
    waiting = [_pool().submit(fn, part) for part in others]
    return np.concatenate([fn(first), *(part.result() for part in waiting)])


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="rank")


def _best(
    order_TE: Float32, columns: Int64 | Int32, count: int, class_E: Int64 | None = None
) -> Int64:
    keys_TE: Int64 = _falling(order_TE).astype(np.int64)
    keys_TE <<= _INDEX_BITS
    keys_TE |= columns
    if class_E is not None:
        keys_TE -= class_E << (_INDEX_BITS + _NUMBER_BITS)
    keys_TE.sort(axis=-1)
    return keys_TE[:, :count] & ((1 << _INDEX_BITS) - 1)


def _best_of_many(order_TE: Float32, count: int) -> Int64:
    """Sort the numbers themselves for a short list, then rank that exactly.

    The lowest bits of each number are given away to its index. The short list holds the best
    `count` unless its last entry ties with the count-th in the bits that are left, whatever the
    sign; such rows are ranked whole.
    """
    num_rows, width = order_TE.shape
    lowest = (1 << (width - 1).bit_length()) - 1
    columns_E = np.arange(width, dtype=np.int32)
    # An infinity with an index in it would be NaN, and a vector sort does not keep NaN's bits.
    marked_TE = np.clip(order_TE, -_LARGEST, _LARGEST)
    bits_TE = marked_TE.view(np.int32)
    bits_TE &= ~lowest
    bits_TE |= columns_E
    marked_TE.sort(axis=-1)
    short_TC = bits_TE[:, -count - _SPARE :]
    columns_TC = short_TC & lowest
    places_TC = columns_TC + width * np.arange(num_rows)[:, None]
    best = _best(order_TE.reshape(-1).take(places_TC), columns_TC, count)
    tied_T = (short_TC[:, -count] ^ short_TC[:, 0]) & (_MAGNITUDE ^ lowest) == 0
    if tied_T.any():
        best[tied_T] = _best(order_TE[tied_T], columns_E, count)
    return best


def _falling(order: Float32) -> Int32:
    """Return whole numbers that fall as fp32 numbers rise; negative zero counts as zero."""
    bits: Int32 = np.subtract(np.float32(0), order).view(np.int32)  # 0 - x is never negative zero
    mirrored: Any = bits >> 31
    mirrored &= _MAGNITUDE
    bits ^= mirrored
    return bits
