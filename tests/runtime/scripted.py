"""A draft that knows what the target will write, and says it, or something else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.runtime.draft.network import Feed

WIDTH = 4096
NUMBERS = np.random.default_rng(5)


class Seen:
    """What the scripted draft has taken in of one sequence."""

    def __init__(self):
        self.token_ids: list[int] = []

    @property
    def length(self):
        return len(self.token_ids)

    def roll_back(self, length):
        del self.token_ids[length:]


class Scripted:
    """Stands where a `DraftNetwork` does; proposes what `say` makes of the true next token."""

    num_positions = 512

    def __init__(self, texts: Sequence[Sequence[int]], say: Callable[[int], int]):
        self.texts, self.say = [list(text) for text in texts], say

    def remember(self):
        return Seen()

    def run(self, feeds: Sequence[Feed]) -> torch.Tensor:
        logits_BV = torch.zeros(len(feeds), WIDTH)
        for row, feed in zip(logits_BV, feeds, strict=True):
            feed.memory.token_ids += feed.token_ids
            row[self.say(self._next(feed.memory.token_ids))] = 9.0
        return logits_BV

    def read(self, token_ids: Sequence[int], count: int) -> torch.Tensor:
        logits_NV = torch.zeros(count, WIDTH)
        for row, token_id in zip(logits_NV, token_ids[-count:], strict=True):
            row[self.say(token_id)] = 9.0
        return logits_NV

    def _next(self, seen: list[int]) -> int:
        for text in self.texts:
            if len(text) > len(seen) and text[: len(seen)] == seen:
                return text[len(seen)]
        return 3


def wrong(token_id: int) -> int:
    """Never the true token."""
    return (token_id + 1) % WIDTH


def by_chance(token_id: int) -> int:
    """The true token in half of all cases."""
    return token_id if NUMBERS.random() < 0.5 else wrong(token_id)


SAYINGS: dict[str, Callable[[int], int]] = {
    "the target's": lambda token_id: token_id,
    "always wrong": wrong,
    "by chance": by_chance,
}
