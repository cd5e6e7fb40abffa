"""The paged KV cache: keys and values of all sequences in blocks of one size.

Block 0 is never handed out; it stays zero and pads block tables. A block is zeroed when it is
handed out, so that nothing of its last owner, a NaN included, can reach the next.
"""

from __future__ import annotations

import heapq
import math

import torch
from torch import Tensor

from engine.errors import MachineError


class BlockPool:
    """Hands out and takes back the numbers of blocks 1 to num_blocks, the lowest first.

    So the blocks in use stay close together, and attention can read them where they lie.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._next = 1
        """The lowest block that was never handed out."""
        self._returned: list[int] = []

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._returned) + self.num_blocks + 1 - self._next

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks; the caller has checked `num_free`."""
        assert count <= self.num_free, f"asked for {count} blocks, {self.num_free} are free"
        again = [heapq.heappop(self._returned) for _ in range(min(count, len(self._returned)))]
        first, self._next = self._next, self._next + count - len(again)
        return [*again, *range(first, self._next)]

    def give_back(self, blocks: list[int]) -> None:
        """Take blocks back."""
        for block in blocks:
            heapq.heappush(self._returned, block)


class KVCache:
    """Keys and values of every layer: (blocks, block_size, Hkv, hd) each.

    In memory the heads of a block come before its positions.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        shape = (num_layers, num_blocks + 1, num_kv_heads, block_size, head_dim)
        self.block_size, self.num_kv_heads = block_size, num_kv_heads
        # Not zeroed as a whole: that would touch, and so occupy, memory nobody has asked for yet.
        try:
            self._keys, self._values = (
                torch.empty(shape, dtype=dtype, device=device) for _ in range(2)
            )
        except (RuntimeError, TypeError) as refused:  # torch: too much, or beyond 64 bits
            size = 2 * math.prod(shape) * dtype.itemsize
            raise MachineError(
                f"the KV cache of {num_blocks} blocks of {block_size} tokens needs "
                f"{size / 1e9:,.1f} GB, more than this machine gives; lower num_blocks."
            ) from refused
        self.clear([0])
        self.keys = list(self._keys.transpose(2, 3))
        self.values = list(self._values.transpose(2, 3))
        self._flat = [
            (keys.flatten(0, 2), values.flatten(0, 2))
            for keys, values in zip(self._keys, self._values, strict=True)
        ]
        self._heads = torch.arange(num_kv_heads) * block_size

    @property
    def num_bytes(self) -> int:
        """Memory of keys and values together."""
        return 2 * self._keys.numel() * self._keys.element_size()

    def places(self, slots_T: Tensor) -> Tensor:
        """Return for `write` where (T · Hkv,) heads of `slots_T` = block * block_size + offset lie.

        With blocks of 4 and 2 heads, slot 6 (block 1, offset 2) gives places 10 and 14.
        """
        offsets_T = slots_T % self.block_size
        first_T = (slots_T - offsets_T) * self.num_kv_heads + offsets_T
        return (first_T.unsqueeze(1) + self._heads).view(-1)

    def write(self, layer: int, places: Tensor, k_THd: Tensor, v_THd: Tensor) -> None:
        """Store T rows of keys and values, Hkv heads each, at `places`."""
        keys, values = self._flat[layer]
        keys.index_copy_(0, places, k_THd.flatten(0, 1))
        values.index_copy_(0, places, v_THd.flatten(0, 1))

    def forget(self, blocks: list[int], start: int, end: int) -> None:
        """Zero positions `start` to `end` - 1 of the sequence that owns `blocks`."""
        size = self.block_size
        for place in range(start // size, -(-end // size)):
            rows = slice(max(0, start - place * size), min(size, end - place * size))
            self._keys[:, blocks[place], :, rows] = 0
            self._values[:, blocks[place], :, rows] = 0

    def clear(self, blocks: list[int]) -> None:
        """Zero blocks that are about to be handed to a new owner."""
        if blocks:
            self._keys[:, blocks] = 0
            self._values[:, blocks] = 0
