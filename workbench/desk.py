"""Where control messages wait for the engine's thread.

They arrive on the telemetry's thread, but may change the engine only between its steps. The desk
takes them there, answers with a Future, and runs them when the loop says so. What only reads, and
may take a while, runs aside on a thread of its own.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from engine.errors import RequestError, nearest

Handler = Callable[[Mapping[str, Any]], Mapping[str, Any] | None]
"""Takes a control message's detail on the engine's thread; a WorkbenchError refuses it."""


class Desk:
    """Takes control messages for the actions it knows; refuses all others with a reason."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}
        self._aside: set[str] = set()
        self._helper = ThreadPoolExecutor(max_workers=1, thread_name_prefix="desk-aside")
        self._waiting: queue.SimpleQueue[
            tuple[str, Mapping[str, Any], Future[Mapping[str, Any] | None]]
        ] = queue.SimpleQueue()

    def handle(self, action: str, handler: Handler, *, aside: bool = False) -> None:
        """Know one more action, or do a known one in another way.

        Args:
            action: its name.
            handler: does it.
            aside: run it on another thread while the engine steps; it must only read.
        """
        self._handlers[action] = handler
        (self._aside.add if aside else self._aside.discard)(action)

    def close(self) -> None:
        """Start nothing more aside."""
        self._helper.shutdown(wait=False, cancel_futures=True)

    def take(self, action: str, detail: Mapping[str, Any]) -> Future[Mapping[str, Any] | None]:
        """Queue one message; from any thread.

        Raises:
            RequestError: nobody here does `action`.
        """
        if action not in self._handlers:
            known = ", ".join(self._handlers) or "none yet"
            raise RequestError(
                f"unknown action {action!r}{nearest(action, self._handlers)} "
                f"known actions: {known}."
            )
        if action in self._aside:
            return self._helper.submit(self._handlers[action], detail)
        answer: Future[Mapping[str, Any] | None] = Future()
        self._waiting.put((action, detail, answer))
        return answer

    def serve(self, wait_s: float = 0.0) -> None:
        """Run what waits, on the calling thread; with nothing there, wait up to `wait_s` for it."""
        try:
            entry = self._waiting.get(block=wait_s > 0, timeout=wait_s or None)
            while True:
                self._run(*entry)
                entry = self._waiting.get_nowait()
        except queue.Empty:
            return

    def _run(
        self,
        action: str,
        detail: Mapping[str, Any],
        answer: Future[Mapping[str, Any] | None],
    ) -> None:
        try:
            answer.set_result(self._handlers[action](detail))
        except Exception as fault:
            # Whoever asked is told; the loop goes on.
            answer.set_exception(fault)
