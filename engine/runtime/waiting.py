"""The queue of sequences that wait for a place in a step, the one that is due first in front.

A sequence is due when it arrived, later or earlier by its priority: each step of priority is worth
a fixed time of waiting. So an urgent request overtakes, and nobody waits for ever: whoever has
waited long enough is due before every newcomer.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterator

from engine.runtime.sequence import Sequence


def due(sequence: Sequence) -> tuple[float, int]:
    """Return by what sequences are ordered: the smaller goes first."""
    return sequence.due_s, sequence.request_id


class Queue:
    """Sequences in the order in which they are due; used from several threads."""

    def __init__(self) -> None:
        self._line: list[Sequence] = []
        self._lock = threading.Lock()

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait at its place."""
        with self._lock:
            bisect.insort(self._line, sequence, key=due)

    def remove(self, sequence: Sequence) -> None:
        """Let a sequence that waits here go."""
        with self._lock:
            self._line.remove(sequence)

    @property
    def first(self) -> Sequence:
        """Whoever is due first; somebody must wait."""
        return self._line[0]

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self._line))

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._line
