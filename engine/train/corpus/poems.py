"""Poems of the Tang dynasty in traditional Chinese (public domain; the package is MIT)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

POEMS_PER_PIECE = 8


def poems(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (key, text) per eight poems: title, author, lines; an empty line between poems."""
    for path in sorted(folder.glob("**/poet.tang.*.json")):
        collection = json.loads(path.read_text(encoding="utf-8"))
        for start in range(0, len(collection), POEMS_PER_PIECE):
            chosen = collection[start : start + POEMS_PER_PIECE]
            piece = "\n\n".join(
                "\n".join([poem["title"], poem["author"], *poem["paragraphs"]]) for poem in chosen
            )
            yield f"tang/{path.stem}/{start:05d}", piece
