"""Statements of set.mm, a database of formal mathematics, with their English comments (CC0).

Only set.mm is read: its neighbours in the package carry other licences.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

STATEMENTS_PER_PIECE = 10
STATEMENT = re.compile(
    r"\$\(\s(?P<comment>.*?)\s\$\)\s+(?P<label>\S+) \$[pa] (?P<formula>.*?)(?:\$=.*?)?\$\.",
    re.DOTALL,
)
CREDITS = re.compile(r"\s*\((?:Contributed|Revised|Proof shortened|New usage|Proof mod)[^)]*\)")
MAX_COMMENT = 900


def statements(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (key, text) per ten statements: a comment, then label and formula; no proofs."""
    text = (folder / "usr/share/metamath/databases/set.mm").read_text(encoding="utf-8")
    kept = [entry for found in STATEMENT.finditer(text) if (entry := _entry(found))]
    for start in range(0, len(kept), STATEMENTS_PER_PIECE):
        piece = "\n".join(kept[start : start + STATEMENTS_PER_PIECE])
        yield f"setmm/{start:06d}", piece


def _entry(found: re.Match[str]) -> str | None:
    comment = " ".join(found["comment"].split())
    # A match that began in a section heading swallowed other comments: leave it.
    unusable = ("$(", "=-=", "#*#", "<HTML>", "<HTML")
    if len(comment) > MAX_COMMENT or any(mark in comment for mark in unusable):
        return None
    formula = " ".join(found["formula"].split())
    return f"{CREDITS.sub('', comment)}\n  {found['label']} {formula}"
