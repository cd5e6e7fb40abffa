"""How often one caller may call: a bucket of tokens per key or address, in bounded memory."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

MAX_CALLERS = 4096
"""Buckets kept; the one that was idle longest goes first."""


class Rate:
    """Buckets that hold a minute's calls and fill evenly. Used on one thread."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def spent(self, caller: str) -> bool:
        """Say whether the next call would be one too many, counting none."""
        return self._left(caller, self._clock()) < 1.0

    def allows(self, caller: str) -> bool:
        """Count one call and say whether it is still within the rate."""
        now = self._clock()
        left = self._left(caller, now)
        self._buckets.pop(caller, None)
        allowed = left >= 1.0
        self._buckets[caller] = (left - 1.0 if allowed else left, now)
        while len(self._buckets) > MAX_CALLERS:
            self._buckets.popitem(last=False)
        return allowed

    def _left(self, caller: str, now: float) -> float:
        left, seen = self._buckets.get(caller, (float(self.per_minute), now))
        return min(self.per_minute, left + (now - seen) * self.per_minute / 60.0)
