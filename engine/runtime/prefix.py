"""Prefix reuse: blocks of the KV cache that one request has filled and others read.

A full block is known by a key: the hash of its tokens, of its predecessor's key and, at the
beginning of the chain, of what else its values depend on (`engine.runtime.control`, `conditions`).
So two requests share a block only if all tokens up to its end are the same and were computed
alike. Nobody writes a shared block: a request goes on in a block of its own. Blocks that nobody
uses are kept, and given up in the order of their last use when others need room.

A request can tell by the time of its first token that another one with the same beginning came
before it; where callers must not learn that of each other, switch `prefix_reuse` off.

Source: the hash chain is that of vLLM's automatic prefix caching (its design document of this
name).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from engine.model.kv_cache import BlockPool

Key = bytes
KEY_BYTES = 16


@dataclass(slots=True)
class Chain:
    """The keys of a sequence's full blocks, computed as far as anybody asked."""

    conditions: Key
    """What its values depend on besides tokens."""
    keys: list[Key] = field(default_factory=list)
    num_shared: int = 0
    """Of its computed blocks, how many the pool has been told of."""

    def upto(self, num_blocks: int, token_ids: SequenceOf[int], block_size: int) -> list[Key]:
        """Return the keys of the first `num_blocks` blocks, all of them full."""
        for block in range(len(self.keys), num_blocks):
            before = self.keys[-1] if self.keys else self.conditions
            tokens = np.array(token_ids[block * block_size : (block + 1) * block_size], np.int64)
            self.keys.append(blake2b(before + tokens.tobytes(), digest_size=KEY_BYTES).digest())
        return self.keys[:num_blocks]


class SharedBlocks:
    """A block pool whose blocks can have a key and several users."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._pool = BlockPool(num_blocks)
        self._block_of: dict[Key, int] = {}
        self._key_of: dict[int, Key] = {}
        self._users: dict[int, int] = {}
        """Of each block with a key."""
        self._unused: OrderedDict[int, None] = OrderedDict()
        """Blocks with a key and no user, the longest unused first."""

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses, those kept for reuse included."""
        return self._pool.num_free + len(self._unused)

    @property
    def num_kept(self) -> int:
        """Of the free blocks, those kept for reuse."""
        return len(self._unused)

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks of unknown content; the caller has checked `num_free`."""
        while self._pool.num_free < count:
            block, _ = self._unused.popitem(last=False)
            self._forget(block)
            self._pool.give_back([block])
        return self._pool.take(count)

    def find(self, keys: SequenceOf[Key]) -> list[int]:
        """Hand out the blocks of the longest known beginning of `keys`, to be read only."""
        found: list[int] = []
        for key in keys:
            if (block := self._block_of.get(key)) is None:
                break
            self._users[block] += 1
            self._unused.pop(block, None)
            found.append(block)
        return found

    def share(self, block: int, key: Key) -> None:
        """Let others find a block that is in use and full; one that is known already stays so."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key], self._key_of[block], self._users[block] = block, key, 1

    def give_back(self, blocks: SequenceOf[int]) -> None:
        """Take a sequence's blocks back; the end of a chain is given up before its beginning."""
        for block in reversed(blocks):
            if block not in self._key_of:
                self._pool.give_back([block])
                continue
            self._users[block] -= 1
            if not self._users[block]:
                self._unused[block] = None

    def forget(self) -> None:
        """Forget what the blocks hold, as when their memory is gone; those in use stay so."""
        unused = list(self._unused)
        self._unused.clear()
        assert len(unused) == len(self._key_of), "blocks of a lost cache are still in use"
        self._block_of.clear()
        self._key_of.clear()
        self._users.clear()
        self._pool.give_back(unused)

    def _forget(self, block: int) -> None:
        del self._block_of[self._key_of.pop(block)]
        del self._users[block]
