"""How commands speak: one JSON object on stdout, or text for people; notes go to stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any


def print_json(report: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout; a number that JSON has no word for becomes null."""
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    ascii_only = encoding.lower().replace("-", "") != "utf8"
    text = json.dumps(_plain(report), ensure_ascii=ascii_only, allow_nan=False)
    if not ascii_only:
        # A lone surrogate has no UTF-8 form; JSON's own escape keeps it.
        text = "".join(c if not "\ud800" <= c <= "\udfff" else f"\\u{ord(c):04x}" for c in text)
    print(text)


def say(text: str) -> None:
    """Print a note for people on stderr."""
    print(text, file=sys.stderr, flush=True)


def count(number: int, noun: str) -> str:
    """Return `1 row`, `2 rows`, `12,345 rows`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size(num_bytes: float) -> str:
    """Return bytes in the unit that reads best: `16.8 MB`, `1.2 GB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def _plain(value: Any) -> Any:
    """Return `value` with numpy turned into plain numbers and lists, NaN and inf into None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
