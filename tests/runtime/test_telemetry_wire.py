"""Messages of the telemetry: whole however they are cut, refused when damaged."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

from engine.runtime.telemetry import Message
from engine.runtime.telemetry.wire import (
    Kind,
    Splitter,
    WireError,
    decode,
    encode,
    proof,
    proves,
)
from tests.runtime.telemetry_examples import (
    KEY,
)


def test_a_message_comes_back_as_it_was_sent():
    message = Message(
        Kind.FRAME,
        seq=2**40,
        time_s=12.5,
        meta={"text": "Grüße, мир", "n": [1, None]},
        arrays={
            "a": np.arange(6, dtype="<i4").reshape(2, 3),
            "none": np.zeros((0, 3, 5), "<i8"),
            "odd": np.arange(5, dtype="|u1"),
            "strided": np.arange(12, dtype="<f4").reshape(3, 4)[:, ::2],
        },
    )
    (back,) = Splitter(1 << 20).feed(encode(message))
    assert (back.kind, back.seq, back.time_s, back.meta) == (
        Kind.FRAME,
        2**40,
        12.5,
        message.meta,
    )
    assert list(back.arrays) == list(message.arrays)
    for name, array in message.arrays.items():
        assert back.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(back.arrays[name], array)


def test_messages_arrive_whole_however_the_bytes_are_cut():
    stream = b"".join(encode(Message(Kind.ACK, seq=seq)) for seq in range(1, 6))
    for size in (1, 3, 7, 41, len(stream)):
        splitter = Splitter(1 << 10)
        got = [
            message.seq
            for at in range(0, len(stream), size)
            for message in splitter.feed(stream[at : at + size])
        ]
        assert got == [1, 2, 3, 4, 5]


def test_every_cut_or_flipped_byte_is_refused_or_read_as_a_message():
    good = encode(Message(Kind.FRAME, 1, 1.0, {"k": 1}, {"a": np.arange(3, dtype="<i4")}))[4:]
    for length in range(len(good)):
        with pytest.raises(WireError):
            decode(good[:length])
    refused = 0
    for at in range(len(good)):
        for bit in range(8):
            bad = bytearray(good)
            bad[at] ^= 1 << bit
            try:
                decode(bytes(bad))
            except WireError:
                refused += 1
    assert refused > len(good), "most flips in head and listing must be noticed"


@pytest.mark.parametrize(
    ("listing", "word"),
    [
        ("x", "malformed"),
        ([["a", "|O", [1]]], "malformed"),
        ([["a", "<i4", [-1]]], "malformed"),
        ([["a", "<i4", [2**40]]], "malformed"),
        ([["a", "<i4", [2**20, 2**20, 2**20]]], "past the end"),
        ([["a", "<i4", [1, 1, 1, 1, 1]]], "malformed"),
        ([["a", "<i4", [True]]], "malformed"),
        ([[1, "<i4", [1]]], "malformed"),
        ([[]] * 100, "malformed"),
        ([], "left over"),
    ],
)
def test_a_listing_that_lies_about_the_bytes_is_refused(listing, word):
    meta = json.dumps({"arrays": listing}).encode()
    meta += b" " * (-len(meta) % 8)
    head = struct.pack("<4sHHQdII", b"TRWF", 1, Kind.FRAME, 1, 0.0, len(meta), 0)
    with pytest.raises(WireError, match=word):
        decode(head + meta + b"\0" * 8)


def test_another_version_is_refused_by_name():
    bad = bytearray(encode(Message(Kind.ACK))[4:])
    bad[4] = 9
    with pytest.raises(WireError, match="version 9 is not 1"):
        decode(bytes(bad))


def test_a_proof_shows_the_key_for_one_role_and_nonce():
    given = proof(KEY, "viewer", "abc")
    assert proves(KEY, "viewer", "abc", given)
    for wrong in (
        proof(KEY[::-1], "viewer", "abc"),
        proof(KEY, "engine", "abc"),
        proof(KEY, "viewer", "abd"),
        given[:-1],
        "",
        "ü",
        None,
        7,
    ):
        assert not proves(KEY, "viewer", "abc", wrong)
    assert KEY.hex() not in given
