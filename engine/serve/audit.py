"""Who did what and how it ended: one JSON line a call, rotated, never with a prompt's text.

    {"time": "2026-11-30T11:40:02.123Z", "source": "127.0.0.1", "key": "loader",
     "operation": "POST /v1/completions", "input_bytes": 71, "outcome": "200", "duration_ms": 48.1}

`detail` is added where a refusal has a reason of its own, and says with what values an operator
acted; it holds numbers and our words alone. `drafts` is added where a draft model stands by: how
many tokens of a call's completions it proposed, and how many of them the model drew as well.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path

from engine.errors import ConfigError
from engine.routing.speculation import Figures
from engine.runtime.results import Completion

MAX_FILE_BYTES = 16 << 20
KEPT_FILES = 5


@dataclass(slots=True)
class Entry:
    """One call."""

    source: str
    operation: str
    key: str = "-"
    input_bytes: int = 0
    input_tokens: int | None = None
    drafts: Figures | None = None
    """Of its completions that have ended; None without a draft."""
    outcome: str = ""
    """An HTTP status, a gRPC code's name, or `aborted`."""
    detail: str = ""
    duration_ms: float = 0.0

    def account(self, done: Completion) -> None:
        """Add what became of one of the call's completions."""
        if done.draft is not None:
            self.drafts = self.drafts or Figures()
            self.drafts.add(done.draft)


class Audit:
    """Writes entries to one file, or drops them when there is none."""

    def __init__(
        self, path: Path | None, *, max_bytes: int = MAX_FILE_BYTES, kept: int = KEPT_FILES
    ) -> None:
        """Open the file.

        Raises:
            ConfigError: it cannot be written.
        """
        self._handler: RotatingFileHandler | None = None
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._handler = _Private(
                path, maxBytes=max_bytes, backupCount=kept, encoding="utf-8", errors="replace"
            )
        except OSError as wrong:
            raise ConfigError(f"audit_log ({path}) cannot be written: {wrong.strerror}.") from None

    def write(self, entry: Entry) -> None:
        """Add one line."""
        if self._handler is None:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line: dict[str, object] = {
            "time": now,
            "source": entry.source,
            "key": entry.key,
            "operation": entry.operation,
            "input_bytes": entry.input_bytes,
            "outcome": entry.outcome,
            "duration_ms": round(entry.duration_ms, 1),
        }
        if entry.input_tokens is not None:
            line["input_tokens"] = entry.input_tokens
        if entry.drafts is not None:
            line["drafts"] = {
                "proposed": entry.drafts.proposed,
                "accepted": entry.drafts.accepted,
            }
        if entry.detail:
            line["detail"] = entry.detail
        self._handler.handle(
            logging.LogRecord("audit", logging.INFO, "", 0, json.dumps(line), None, None)
        )

    def close(self) -> None:
        """Close the file."""
        if self._handler is not None:
            self._handler.close()


class _Private(RotatingFileHandler):
    """A rotating file that its owner alone may read."""

    def _open(self):  # type: ignore[no-untyped-def]
        file = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        return os.fdopen(file, "a", encoding=self.encoding, errors=self.errors)
