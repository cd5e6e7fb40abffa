"""What became of a drill's requests, as its gateway counts them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.runtime.engine import RequestOutput


class Ledger:
    """Counts requests that ended since the last change."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self._finished = self._lost = self._tokens = 0
        self._rerun: dict[str, int] = {}
        self._longest_s = 0.0
        self._since_s = self._last_s = time.monotonic()

    def take(self, outputs: Sequence[RequestOutput]) -> None:
        """Count what one step brought."""
        if outputs:
            now = time.monotonic()
            self._longest_s = max(self._longest_s, now - self._last_s)
            self._last_s = now
        for output in outputs:
            self._tokens += len(output.token_ids)
            if (done := output.completion) is not None:
                self._finished += 1
                for cause, rows in done.extra_rows.items():
                    self._rerun[cause] = self._rerun.get(cause, 0) + rows

    def lost(self, count: int) -> None:
        """Count requests that ended with their engine."""
        self._lost += count

    def facts(self) -> dict[str, Any]:
        """Return the counts."""
        return {
            "finished": self._finished,
            "lost": self._lost,
            "tokens": self._tokens,
            "tokens_a_second": self._tokens / max(1e-9, time.monotonic() - self._since_s),
            "longest_pause_s": round(self._longest_s, 3),
            "rerun_rows": dict(self._rerun),
        }
