"""SWORD modules: the New Testament in English and Spanish (public domain).

Only the New Testament is read, so that the two texts are parallel; a book's OSIS name is its key.

A module has two compressed files, one block per book: `*.bzs` is an index of three little-endian
32-bit numbers per block (offset, compressed size, full size) into `*.bzz`, which is zlib data.
Source: the SWORD project's description of its zText drivers.
"""

from __future__ import annotations

import html
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

PIECE = re.compile(r".{1,3000}(?:(?<=[.?!;:”])\s|$)|.{1,3000}", re.DOTALL)
NOTES = re.compile(r"<(note|title)\b.*?</\1>", re.DOTALL)
BOOK = re.compile(r'osisID="(\w+)"[^>]*type="book"')
BREAKS = re.compile(r"</?(?:lb|lg|l|p|chapter|div|verse|milestone|transChange)\b[^>]*>")
TAGS = re.compile(r"<[^>]+>")
SPACED_SIGN = re.compile(r" +([,.;:!?])")


def books(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (key, text) per piece of up to 3000 characters, cut after a sentence.

    The key `bible/Luke#00012` is piece 12 of a book; all pieces of a book share a split.
    """
    (module,) = folder.glob("usr/share/sword/modules/texts/ztext/*")
    index = (module / "nt.bzs").read_bytes()
    blocks = (module / "nt.bzz").read_bytes()
    for offset, size, _ in struct.iter_unpack("<III", index):
        if not size:
            continue
        markup = zlib.decompress(blocks[offset : offset + size]).decode("utf-8", "replace")
        book = BOOK.search(markup)
        # A block that opens no book repeats verses that another tradition numbers elsewhere.
        if book is None:
            continue
        for piece, text in enumerate(PIECE.findall(_plain(markup))):
            yield f"bible/{book[1]}#{piece:05d}", text.strip()


def _plain(markup: str) -> str:
    text = TAGS.sub("", BREAKS.sub(" ", NOTES.sub(" ", markup)))
    return SPACED_SIGN.sub(r"\1", " ".join(html.unescape(text).split()))
