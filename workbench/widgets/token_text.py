"""Tokens as people can read them: visible white space, and characters that several tokens share.

A byte-level tokenizer cuts where it likes: `🦊` may be four tokens of one byte each. Such a token
is written as its bytes in hex, with a sentence that says which character it is a part of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

SPACE, NEWLINE, TAB = "·", "⏎", "⇥"
"""How white space is drawn."""
_NAMED = {" ": SPACE, "\n": NEWLINE, "\t": TAB, "\r": "␍", "\u00a0": "⍽"}


class Tokens(Protocol):
    """What is asked of a tokenizer; `engine.model.tokenizer.Tokenizer` has it."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token; none for a special one."""

    def token(self, token_id: int) -> str:
        """Return one token for people, special ones by name."""


class TokenText(NamedTuple):
    """One token, readable."""

    text: str
    """Never empty; white space and broken bytes made visible."""
    kind: str
    """`text`, `space` (nothing but white space), `bytes` (part of a character) or `special`."""
    note: str
    """A sentence where `text` does not explain itself, else empty."""
    breaks: bool
    """Whether the token ends a line."""


def readable(token_ids: Sequence[int], tokens: Tokens | None) -> list[TokenText]:
    """Return each token of a text; without a tokenizer they are their ids, as `#17`.

    The bytes `44 65 72`, `20 52`, `F0`, `9F A6 8A` read `Der`, `·R`, `F0`, `9F A6 8A`.
    """
    if tokens is None:
        note = "the text is not known here"
        return [TokenText(f"#{token_id}", "special", note, False) for token_id in token_ids]
    parts = [tokens.token_bytes(token_id) for token_id in token_ids]
    pieces: list[list[tuple[str, str]]] = [[] for _ in parts]
    for char, owners in _characters(parts):
        for at, data, number in owners:
            whole = len(owners) == 1 and char
            piece = (_visible(char), "") if whole else (_hex(data), _note(char, data, number))
            pieces[at].append(piece)
    return [
        _joined(pieces[at], parts[at]) if parts[at] else _special(tokens.token(token_id), token_id)
        for at, token_id in enumerate(token_ids)
    ]


def _joined(pieces: list[tuple[str, str]], data: bytes) -> TokenText:
    text = "".join(piece for piece, _ in pieces)
    notes = [note for _, note in pieces if note]
    if notes:
        spaced = " ".join(piece for piece, _ in pieces)
        return TokenText(spaced, "bytes", "; ".join(notes), data.endswith(b"\n"))
    blank = not data.strip()
    return TokenText(text, "space" if blank else "text", "", data.endswith(b"\n"))


def _special(name: str, token_id: int) -> TokenText:
    return TokenText(name or f"#{token_id}", "special", "a special token, not text", False)


Owner = tuple[int, bytes, str]


def _characters(parts: list[bytes]) -> Iterator[tuple[str, list[Owner]]]:
    """Yield each character with its tokens, and each byte that belongs to none with an empty one.

    An owner is a token's place, its bytes in the character, and which of the character's bytes
    these are, as `2-4 of 4`.
    """
    place = [at for at, part in enumerate(parts) for _ in part]
    data = b"".join(parts)
    at = 0
    while at < len(data):
        size = _size(data[at])
        whole = data[at : at + size]
        try:
            char = whole.decode()
        except UnicodeDecodeError:
            char, size, whole = "", 1, data[at : at + 1]
        owners: dict[int, list[int]] = {}
        for offset in range(size):
            owners.setdefault(place[at + offset], []).append(offset)
        parts_of = [
            (token, bytes(whole[o] for o in offsets), _span(offsets, size))
            for token, offsets in owners.items()
        ]
        yield char, parts_of
        at += size


def _size(lead: int) -> int:
    """Return how many bytes a UTF-8 character that begins with `lead` has."""
    return 4 if lead >= 0xF0 else 3 if lead >= 0xE0 else 2 if lead >= 0xC0 else 1


def _span(offsets: list[int], size: int) -> str:
    first, last = offsets[0] + 1, offsets[-1] + 1
    return f"{first} of {size}" if first == last else f"{first}-{last} of {size}"


def _note(char: str, data: bytes, number: str) -> str:
    if not char:
        return f"byte {_hex(data)} is no part of a character"
    return f"byte{'s' if len(data) > 1 else ''} {number} of {char}"


def _hex(data: bytes) -> str:
    return data.hex(" ").upper()


def _visible(char: str) -> str:
    if char in _NAMED:
        return _NAMED[char]
    if ord(char) < 0x20:
        return chr(0x2400 + ord(char))
    return char if char.isprintable() else f"U+{ord(char):04X}"
