"""Python's standard library as source text (PSF licence)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

LEFT_OUT = re.compile(
    r"/(test|tests|idlelib|lib2to3|pydoc_data|encodings|__pycache__)/|config-3|_sysconfigdata"
)
NOTICE = re.compile(r"copyright|licen[cs]e|all rights reserved", re.IGNORECASE)
PSF_NOTICE = re.compile(r"Licensed to (the )?PSF|license: PSF", re.IGNORECASE)
MIN_CHARS, MAX_CHARS = 800, 48_000


def modules(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (key, source text) per module of moderate size.

    Left out are tests, tables and every file that carries another notice than the PSF's, so that
    what stays is under the PSF licence alone.
    """
    root = folder / "usr/lib/python3.11"
    for path in sorted(root.rglob("*.py")):
        if LEFT_OUT.search(path.as_posix()):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        fits = MIN_CHARS <= len(text) <= MAX_CHARS and text.isascii()
        if fits and (PSF_NOTICE.search(text) or not NOTICE.search(text)):
            yield f"stdlib/{path.relative_to(root).as_posix()}", text
