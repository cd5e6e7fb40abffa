"""Tokens made readable: white space, shared characters, broken bytes, special tokens."""

from __future__ import annotations

import pytest

from workbench.widgets.token_text import readable

SPECIAL = "<|bos|>"


class Pieces:
    """A tokenizer whose tokens are given; empty bytes are a special token."""

    def __init__(self, *parts: bytes) -> None:
        self.parts = parts

    def token_bytes(self, token_id: int) -> bytes:
        return self.parts[token_id]

    def token(self, token_id: int) -> str:
        return self.parts[token_id].decode("utf-8", "replace") or SPECIAL


def read(*parts: bytes):
    return readable(range(len(parts)), Pieces(*parts))


@pytest.mark.parametrize(
    ("data", "text", "kind"),
    [
        (b"Der", "Der", "text"),
        (b" R", "·R", "text"),
        (b"  ", "··", "space"),
        (b"\n", "⏎", "space"),
        (b"a\tb", "a⇥b", "text"),
        (b"\x07", "␇", "text"),
        ("\u200b".encode(), "U+200B", "text"),
        ("路".encode(), "路", "text"),
        (b"", SPECIAL, "special"),
    ],
)
def test_one_token(data, text, kind):
    (token,) = read(data)
    assert (token.text, token.kind) == (text, kind)


def test_a_character_over_four_tokens_is_named_by_each():
    tokens = read(b"a", b"\xf0", b"\x9f", b"\xa6", b"\x8a", b"b")
    assert [token.text for token in tokens] == ["a", "F0", "9F", "A6", "8A", "b"]
    assert [token.note for token in tokens[1:5]] == [f"byte {n} of 4 of 🦊" for n in range(1, 5)]
    assert {token.kind for token in tokens[1:5]} == {"bytes"}


def test_a_token_with_text_and_part_of_a_character():
    first, second = read(b" \xe2\x80", b"\x9e")
    assert (first.text, first.kind, first.note) == ("· E2 80", "bytes", "bytes 1-2 of 3 of „")
    assert (second.text, second.note) == ("9E", "byte 3 of 3 of „")


def test_bytes_that_belong_to_no_character_say_so():
    cut, stray = read(b"\xf0\x9f", b"x\xff")
    assert cut.text == "F0 9F" and "is no part of a character" in cut.note
    assert stray.text == "x FF" and stray.note == "byte FF is no part of a character"


def test_only_a_newline_at_the_end_breaks_the_line():
    assert [token.breaks for token in read(b"a\n", b"\na", b"b")] == [True, False, False]


def test_without_a_tokenizer_ids_are_shown():
    assert [token.text for token in readable([3, 17], None)] == ["#3", "#17"]


def test_no_tokens():
    assert readable([], Pieces()) == []
