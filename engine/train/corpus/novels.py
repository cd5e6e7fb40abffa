"""Six English novels from an R data package (public domain; the package is MIT).

R keeps lazy-loaded data in two files: `*.rdx`, a compressed R object that lists (offset, length)
per variable, and `*.rdb`, the variables, each a big-endian length, a letter for the compression
and a serialised object. Only what a vector of strings needs is read here.
Source: the R Internals manual, "Serialization Formats".
"""

from __future__ import annotations

import bz2
import lzma
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

PARAGRAPHS_PER_PIECE = 12
POSITION = re.compile(rb"\x00\x00\x00\x0d\x00\x00\x00\x02(.{8})", re.DOTALL)
STRING_VECTOR, STRING = 16, 9
GZIP_OR_ZLIB = zlib.MAX_WBITS | 32
LZMA2 = [{"id": lzma.FILTER_LZMA2, "preset": 6}]


def novels(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (key, text) per piece of twelve paragraphs, one paragraph a line."""
    (index_path,) = folder.glob("**/janeaustenr/data/Rdata.rdx")
    index = zlib.decompress(index_path.read_bytes(), GZIP_OR_ZLIB)
    blocks = index_path.with_suffix(".rdb").read_bytes()
    positions = sorted(struct.unpack(">II", found) for found in POSITION.findall(index))
    for number, (offset, length) in enumerate(positions):
        lines = _strings(_decompress(blocks[offset : offset + length]))
        text = "\n".join(line.strip() for line in lines)
        paragraphs = [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]
        for start in range(0, len(paragraphs), PARAGRAPHS_PER_PIECE):
            piece = "\n".join(paragraphs[start : start + PARAGRAPHS_PER_PIECE])
            yield f"novel/{number}/{start:05d}", piece


def _decompress(block: bytes) -> bytes:
    kind = block[4:5]
    if kind == b"Z":
        return lzma.decompress(block[5:], format=lzma.FORMAT_RAW, filters=LZMA2)
    if kind == b"2":
        return bz2.decompress(block[5:])
    return zlib.decompress(block[4:])


def _strings(data: bytes) -> list[str]:
    """Read a serialised vector of strings; any other object gives an empty list."""
    version = struct.unpack_from(">i", data, 2)[0]
    at = 14
    if version == 3:
        at += 4 + struct.unpack_from(">i", data, at)[0]
    flags, count = struct.unpack_from(">ii", data, at)
    at += 8
    if flags & 0xFF != STRING_VECTOR:
        return []
    strings = []
    for _ in range(count):
        flags, size = struct.unpack_from(">ii", data, at)
        at += 8
        assert flags & 0xFF == STRING, f"unexpected R object {flags:#x} in a string vector"
        strings.append(data[at : at + max(size, 0)].decode("utf-8", "replace"))
        at += max(size, 0)
    return strings
