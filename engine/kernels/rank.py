"""Rank numbers by sorting whole-number keys, on a CPU several times as fast as torch's own ways.

A key holds a class, a number and an index, so no two are equal and any way of sorting gives the
same answer: class first, then the larger number, then the lower index. numpy sorts whole numbers
with vector instructions; torch sorts and selects (value, index) pairs one by one. Called by
`engine.kernels.topk`.
"""

from __future__ import annotations

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
_GROUP = 8
"""Columns that are looked at through the largest of them first, where there are many."""


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
    if class_E is None and _GROUP * 3 * count <= len(columns_E) and len(columns_E) % _GROUP == 0:
        return _best_of_groups(order_TE, columns_E, count)
    if class_E is not None or 4 * (count + _SPARE) > len(columns_E):
        return _best(order_TE, columns_E, count, class_E)
    return _best_of_many(order_TE, columns_E, count)


def sum_of_best_two(order: Tensor) -> Tensor:
    """Return the sum of the two largest numbers of the last dimension, at least two long."""
    if order.device.type != "cpu":
        return order.topk(2, dim=-1).values.sum(-1)
    rising = np.sort(order.detach().numpy(), axis=-1)  # thrice as fast as to partition
    return torch.from_numpy(rising[..., -1] + rising[..., -2])


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


def _best_of_groups(order_TE: Float32, columns_E: Int64, count: int) -> Int64:
    """Rank exactly the members of the groups with the largest heads.

    The best `count` lie in the `count` groups whose largest numbers are best, unless the last of
    these groups ties with the next in the bits that half a key keeps; such rows are ranked whole.
    Columns 0, G, 2 G … are a group, so that the largest are found with long strides.
    """
    num_rows, num_groups = len(order_TE), len(columns_E) // _GROUP
    order = torch.from_numpy(order_TE)
    heads_TG = order.reshape(num_rows, _GROUP, num_groups).amax(1).numpy()
    keys_TG, lowest = _half_keys(heads_TG)
    groups_TC = (keys_TG[:, :count] & lowest).astype(np.int64)
    columns_TC = np.tile(groups_TC, _GROUP)
    columns_TC += np.repeat(num_groups * np.arange(_GROUP), count)
    members_TC = order.gather(1, torch.from_numpy(columns_TC)).numpy()
    best = _best(members_TC, columns_TC, count)
    tied_T = (keys_TG[:, count - 1] ^ keys_TG[:, count]) <= lowest
    if tied_T.any():
        best[tied_T] = _best(order_TE[tied_T], columns_E, count)
    return best


def _half_keys(order: Float32) -> tuple[Int32, int]:
    """Return sorted keys of 32 bits, whose lowest give way to the column, and a mask of those."""
    num_columns = order.shape[1]
    lowest = (1 << (num_columns - 1).bit_length()) - 1
    keys = _falling(order)
    keys &= ~lowest
    keys |= np.arange(num_columns, dtype=np.int32)
    keys.sort(axis=-1)
    return keys, lowest


def _best_of_many(order_TE: Float32, columns_E: Int64, count: int) -> Int64:
    """Sort keys of half the size for a short list, then rank that exactly.

    A half key gives the lowest bits of the number away to the index. The short list holds the best
    `count` unless its last entry ties with the count-th in the bits that are left; such rows are
    ranked whole.
    """
    keys_TE, lowest = _half_keys(order_TE)
    short_TC = keys_TE[:, : count + _SPARE]
    columns_TC = short_TC & lowest
    best = _best(np.take_along_axis(order_TE, columns_TC, axis=-1), columns_TC, count)
    tied_T = (short_TC[:, count - 1] ^ short_TC[:, -1]) <= lowest
    if tied_T.any():
        best[tied_T] = _best(order_TE[tied_T], columns_E, count)
    return best


def _falling(order: Float32) -> Int32:
    """Return whole numbers that fall as fp32 numbers rise; negative zero counts as zero."""
    bits: Int32 = np.subtract(np.float32(0), order).view(np.int32)  # 0 - x is never negative zero
    mirrored: Any = bits >> 31
    mirrored &= 0x7FFFFFFF
    bits ^= mirrored
    return bits
