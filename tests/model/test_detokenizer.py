"""Streaming text never splits a character and never leaks a stop string."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer

from engine.errors import CheckpointError
from engine.model.detokenizer import Detokenizer
from engine.model.tokenizer import Tokenizer

FOLDER = Path(__file__).parents[2] / "data/models/polyglot-moe"
TOKENIZER = Tokenizer(FOLDER)
LIBRARY = HfTokenizer.from_file(str(FOLDER / "tokenizer.json"))


class Pieces:
    """A tokenizer whose tokens are given texts."""

    def __init__(self, *pieces):
        self.pieces = pieces

    def token_bytes(self, token_id):
        piece = self.pieces[token_id]
        return piece if isinstance(piece, bytes) else piece.encode()


def stream(pieces, stop=()):
    detokenizer = Detokenizer(Pieces(*pieces), stop)
    deltas = []
    for token_id in range(len(pieces)):
        deltas.append(detokenizer.push(token_id))
        if detokenizer.stopped:
            break
    return deltas, detokenizer.flush(), detokenizer


def test_a_stop_string_over_token_borders_leaks_nothing():
    deltas, rest, detokenizer = stream(["ABC", "DEF", "G", "HI", "J", "K"], ["DEFGHIJ"])
    assert "".join(deltas) + rest == "ABC" and detokenizer.stopped
    assert deltas[0] == "ABC" and detokenizer.text == "ABC"


def test_text_that_only_looked_like_a_stop_string_arrives_whole():
    deltas, rest, _ = stream(["DEF", "G", "X"], ["DEFGHIJ"])
    assert deltas == ["", "", "DEFGX"] and rest == ""


def test_the_end_flushes_what_was_held():
    deltas, rest, detokenizer = stream(["DEF", "G"], ["DEFGHIJ"])
    assert deltas == ["", ""] and rest == "DEFG" and not detokenizer.stopped


def test_the_earliest_of_several_stop_strings_cuts():
    _, _, detokenizer = stream(["one two three"], ["three", "two"])
    assert detokenizer.text == "one "


def test_a_character_in_pieces_comes_out_when_it_is_whole():
    snow = "雪".encode()
    deltas, rest, _ = stream([snow[:1], snow[1:2], snow[2:], b"a"])
    assert deltas == ["", "", "雪", "a"] and rest == ""
    assert stream([snow[:2]])[1] == "\ufffd"


def cut(ids, stop):
    """Return the text up to the stop string that is complete first, with the tokens so far."""
    for count in range(len(ids)):
        text = TOKENIZER.decode(ids[: count + 1]).rstrip("\ufffd")  # the rest of a character
        if starts := [at for one in stop if (at := text.find(one)) >= 0]:
            return text[: min(starts)]
    return TOKENIZER.decode(ids)


def test_a_stop_string_that_is_complete_ends_the_text_though_a_longer_one_has_begun():
    deltas, rest, detokenizer = stream(["ab", "c", "d"], ["abcd", "c"])
    assert detokenizer.text == "ab" and "".join(deltas) + rest == "ab"


@settings(max_examples=150, deadline=None)
@given(
    st.text(max_size=60),
    st.lists(
        st.text(st.characters(exclude_characters="\ufffd"), min_size=1, max_size=5), max_size=3
    ),
)
def test_streamed_text_equals_the_whole_text_up_to_the_first_stop(text, stop):
    ids = TOKENIZER.encode(text)
    detokenizer = Detokenizer(TOKENIZER, stop)
    sent = ""
    for token_id in ids:
        sent += detokenizer.push(token_id)
        assert not any(one in sent for one in stop)
        if detokenizer.stopped:
            break
    sent += detokenizer.flush()
    assert sent == cut(ids, stop)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=30))
def test_any_ids_decode_as_the_library_decodes_them(ids):
    assert TOKENIZER.decode(ids) == LIBRARY.decode(ids, skip_special_tokens=True)


def test_text_survives_the_round_trip_and_tokens_show_as_text():
    for text in ("Überraschung! 12 * 7 = 84", "你好，世界", "def f(x):\n    return x"):
        assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
    assert TOKENIZER.token(TOKENIZER.encode("a")[0]) == "<|bos|>"
    assert TOKENIZER.token_bytes(10**6) == b""


def test_a_missing_or_broken_tokenizer_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="missing"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(
        '{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}, "decoder": null}'
    )
    with pytest.raises(CheckpointError, match="byte-level"):
        Tokenizer(tmp_path)
