"""Look-ups: answers of pure functions of a few ids, kept so that they need not be worked out again.

Which replicas a step's rows take, and the order of the rows by expert, follow from a handful of
ids. In a step of a few rows the same ids come again and again, and there the answer is dear
beside the work: the start of each operation costs as much for one row as for thirty. With more rows
the same ids hardly ever meet again, so nothing is looked up there. What the experts are cannot be
looked up: a token's logits depend on all that stands before it, and an answer that is only nearly
right would be a wrong one.

One thread owns a table of look-ups, the one that runs the layer, so there is no lock on the path.
Called by `engine.routing.device` and `engine.exchange.dispatch`.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from torch import Tensor

V = TypeVar("V")

MAX_ROWS = 2
"""Steps with more rows are not looked up. Of the bundled model's decode steps 94 % are found at 1
row and 62 at 2; at 4 it is 18 and pays nothing any more, at 8 none."""
WINDOW, LEAST_HITS, REST = 256, 16, 4096
"""Of so many look-ups so many must find something, or the next ones are left out: with 64 experts
and K = 8 the same ids hardly come again even in steps of one row."""
MAX_ENTRIES = 4096
"""Answers kept; when there are as many, all are forgotten. One row of 8 experts, K = 2, has 56."""


class LookUps(Generic[V]):
    """Answers by key, for one owner.

    A key is the bytes of the ids: `LookUps().key(ids)` of ids ``[[3, 1]]`` is those of 3 and 1.
    """

    def __init__(self) -> None:
        self.max_rows = MAX_ROWS
        """Steps with more rows are not looked up; 0 switches look-ups off."""
        self.hits = 0
        self.misses = 0
        self._answers: dict[bytes, V] = {}
        self._asked = self._found = self._rest = 0

    def key(self, *ids: Tensor) -> bytes | None:
        """Return what to look up, None where it does not pay; the first ids have the rows."""
        first = ids[0]
        if not 0 < first.shape[0] <= self.max_rows or not first.is_cpu:
            return None
        if self._rest:
            self._rest -= 1
            return None
        if len(ids) == 1:
            return first.numpy().tobytes()
        return b"".join(part.numpy().tobytes() for part in ids)

    def get(self, key: bytes) -> V | None:
        """Return the answer to `key`, None for one that is not known, and count which it was."""
        answer = self._answers.get(key)
        self._asked += 1
        if answer is None:
            self.misses += 1
        else:
            self.hits += 1
            self._found += 1
        if self._asked == WINDOW:
            self._rest = 0 if self._found >= LEAST_HITS else REST
            self._asked = self._found = 0
        return answer

    def keep(self, key: bytes, answer: V) -> None:
        """Remember the answer to `key`; nobody may change it from now on."""
        if len(self._answers) >= MAX_ENTRIES:
            self._answers.clear()
        self._answers[key] = answer

    def forget(self) -> None:
        """Forget every answer; the counts stay."""
        self._answers.clear()

    def __len__(self) -> int:
        return len(self._answers)
