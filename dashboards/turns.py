"""What a reader asked for is done one thing after the other, and nothing that was asked is lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from dashboards.session import Session


@dataclass(frozen=True)
class Turn:
    """One thing that was asked for: `key` tells whether it was asked before."""

    key: Hashable
    word: str
    work: Callable[[], Any]


class Turns:
    """A queue of what one session asked for; the work runs on another thread, one at a time.

    Asking for what runs or waits already is a second click and changes nothing.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._running: Turn | None = None
        self._waiting: deque[Turn] = deque()

    @property
    def said(self) -> str:
        """What is being done and what waits; empty at rest."""
        turns = [turn for turn in (self._running, *self._waiting) if turn]
        return ", then: ".join(turn.word for turn in turns) + " …" if turns else ""

    def ask(self, key: Hashable, word: str, work: Callable[[], Any]) -> None:
        """Do `work`, after what was asked for before."""
        if any(turn and turn.key == key for turn in (self._running, *self._waiting)):
            return
        self._waiting.append(Turn(key, word, work))
        self._next()

    def _next(self) -> None:
        if self._running or not self._waiting:
            return
        turn = self._running = self._waiting.popleft()

        def done() -> Any:
            try:
                return turn.work()
            finally:
                self._running = None

        self._session.later(done, lambda answer: None, self._next)
