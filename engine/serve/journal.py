"""What the service's log has said since the start, for those who check it from outside.

Counts by level, tracebacks apart, and the last warnings in our own words: never an argument of a
request.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from typing import Any

KEPT = 50
REFUSED_WEBSOCKET = "ASGI callable returned without completing handshake."
"""What uvicorn 0.54 says of every websocket that was answered with a refusal, which is no error."""


class Journal(logging.Handler):
    """Hangs on the loggers of the service and of its HTTP server."""

    loggers = ("engine", "uvicorn", "grpc", "asyncio")

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._levels: Counter[str] = Counter()
        self._tracebacks = 0
        self._last: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._guard = threading.Lock()

    def __enter__(self) -> Journal:
        for name in self.loggers:
            logging.getLogger(name).addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.loggers:
            logging.getLogger(name).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Count one record."""
        if record.msg == REFUSED_WEBSOCKET:
            return
        failure = record.exc_info[0].__name__ if record.exc_info and record.exc_info[0] else None
        with self._guard:
            self._levels[record.levelname] += 1
            self._tracebacks += failure is not None
            if record.levelno >= logging.WARNING:
                self._last.append(
                    {
                        "time_s": record.created,
                        "level": record.levelname,
                        "logger": record.name,
                        "message": record.getMessage()[:300] if record.name != "asyncio" else "",
                        "exception": failure,
                    }
                )

    def summary(self) -> dict[str, Any]:
        """Return the counts and the last warnings."""
        with self._guard:
            return {
                "levels": dict(self._levels),
                "tracebacks": self._tracebacks,
                "last": list(self._last),
            }
