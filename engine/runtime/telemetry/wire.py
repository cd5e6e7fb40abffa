"""The messages of the telemetry stream: a length, a fixed head, JSON, and raw arrays.

    length u32 | magic 4s | version u16 | kind u16 | seq u64 | time f64 | meta_bytes u32 | 0 u32
    meta       UTF-8 JSON object, padded with spaces to a multiple of 8
    arrays     C order, little endian, each padded with zeros to a multiple of 8

All numbers are little endian; `length` counts what follows it. `meta["arrays"]` lists
`[name, dtype, shape]` in the order of the bytes, so that a reader in any language can view them in
place. Both ends speak it, in both directions. Bytes that break these rules raise `WireError`, and
nothing else; no pickle, nothing is ever evaluated.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

MAGIC = b"TRWF"
VERSION = 1
MAX_FRAME_BYTES = 32 << 20
"""The longest message a viewer accepts."""
MAX_REQUEST_BYTES = 64 << 10
"""The longest message the engine accepts."""
MAX_HELLO_BYTES = 1 << 10
"""The longest message the engine accepts from somebody who has not proven the key."""

DTYPES = ("<i2", "<i4", "<i8", "<f4", "<f8", "|u1")
_LENGTH = struct.Struct("<I")
_HEAD = struct.Struct("<4sHHQdII")
_MAX_ARRAYS = 256

Array = npt.NDArray[Any]


class WireError(ValueError):
    """The other end sent bytes that are not a message; the connection is of no more use."""


class Kind(IntEnum):
    """What a message is; the comment says who sends it."""

    CHALLENGE = 1  # engine: a nonce to prove the key on
    HELLO = 2  # viewer: that proof, and a nonce of its own
    WELCOME = 3  # engine: its proof
    REFUSED = 4  # engine: why this connection ends
    FRAME = 5  # engine: the state of things
    ACK = 6  # viewer: the highest seq drawn
    CONTROL = 7  # viewer: {"id", "action", "detail"}
    REPLY = 8  # engine: {"id", "ok", "result" | "reason"}


@dataclass(frozen=True, slots=True)
class Message:
    """One message, decoded. The arrays are read-only views into the bytes it came in."""

    kind: Kind
    seq: int = 0
    time_s: float = 0.0
    """Seconds since the epoch at the sender."""
    meta: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, Array] = field(default_factory=dict)


def encode(message: Message) -> bytes:
    """Turn a message into bytes, its length first."""
    parts: list[bytes | memoryview] = []
    listing: list[list[Any]] = []
    for name, array in message.arrays.items():
        array = np.ascontiguousarray(array)
        if array.dtype.str not in DTYPES:
            raise TypeError(f"array {name!r} has dtype {array.dtype.str}, not one of {DTYPES}")
        listing.append([name, array.dtype.str, list(array.shape)])
        # Not copied here: the join below is the one copy of what may be megabytes.
        parts += [array.reshape(-1).view(np.uint8).data, bytes(-array.nbytes % 8)]
    meta = {**message.meta, "arrays": listing} if listing else message.meta
    text = json.dumps(meta, separators=(",", ":"), allow_nan=False, default=_plain)
    meta_bytes = text.encode()
    meta_bytes += b" " * (-len(meta_bytes) % 8)
    head = _HEAD.pack(MAGIC, VERSION, message.kind, message.seq, message.time_s, len(meta_bytes), 0)
    length = len(head) + len(meta_bytes) + sum(map(len, parts))
    return b"".join([_LENGTH.pack(length), head, meta_bytes, *parts])


def decode(body: bytes) -> Message:
    """Turn the bytes after the length into a message.

    Raises:
        WireError: the bytes are cut, of another version, or not a message at all.
    """
    if len(body) < _HEAD.size:
        raise WireError(f"{len(body)} bytes are too few for a message head of {_HEAD.size}")
    magic, version, kind, seq, time_s, meta_bytes, _ = _HEAD.unpack_from(body)
    if magic != MAGIC:
        raise WireError(f"not a telemetry message: it starts with {magic!r}")
    if version != VERSION:
        raise WireError(f"telemetry version {version} is not {VERSION}; use the same release")
    if kind not in Kind.__members__.values() or not math.isfinite(time_s):
        raise WireError(f"unknown message kind {kind} or time {time_s}")
    end = _HEAD.size + meta_bytes
    if end > len(body):
        raise WireError(f"meta of {meta_bytes} bytes does not fit a message of {len(body)}")
    try:
        meta = json.loads(body[_HEAD.size : end])
    except (ValueError, RecursionError):
        raise WireError("meta is not JSON") from None
    if not isinstance(meta, dict):
        raise WireError("meta is not a JSON object")
    arrays = _arrays(body, end, meta.pop("arrays", []))
    return Message(Kind(kind), seq, time_s, meta, arrays)


class Splitter:
    """Cuts a stream of bytes into messages."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that `data` completes.

        Raises:
            WireError: a length is above `max_bytes`, or a message is malformed.
        """
        self._buffer += data
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self.max_bytes:
                raise WireError(f"a message of {length} bytes is above {self.max_bytes}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            with memoryview(self._buffer) as view:
                body = bytes(view[_LENGTH.size : end])
            messages.append(decode(body))
            del self._buffer[:end]
        return messages


def proof(key: bytes, role: str, nonce: str) -> str:
    """Return what shows possession of `key` without sending it: HMAC-SHA256 over role and nonce."""
    return hmac.new(key, f"{role}:{nonce}".encode(), hashlib.sha256).hexdigest()


def proves(key: bytes, role: str, nonce: str, given: object) -> bool:
    """Say whether `given` is the proof, in time that does not depend on where it differs."""
    if not isinstance(given, str) or not given.isascii():
        return False
    return hmac.compare_digest(proof(key, role, nonce), given)


def _arrays(body: bytes, offset: int, listing: object) -> dict[str, Array]:
    if not isinstance(listing, list) or len(listing) > _MAX_ARRAYS:
        raise WireError("the list of arrays is malformed")
    arrays: dict[str, Array] = {}
    for entry in listing:
        name, dtype, shape = _entry(entry)
        count = math.prod(shape)
        size = count * np.dtype(dtype).itemsize
        if offset + size > len(body):
            raise WireError(f"array {name!r} of {size} bytes runs past the end of the message")
        arrays[name] = np.frombuffer(body, dtype, count, offset).reshape(shape)
        offset += -(-size // 8) * 8
    if offset != len(body):
        raise WireError(f"{len(body) - offset} bytes are left over after the arrays")
    return arrays


def _entry(entry: object) -> tuple[str, str, tuple[int, ...]]:
    match entry:
        case [str(name), str(dtype), list(shape)] if dtype in DTYPES and len(shape) <= 4:
            if all(type(n) is int and 0 <= n <= MAX_FRAME_BYTES for n in shape):
                return name, dtype, tuple(shape)
    raise WireError(f"array entry {str(entry)[:80]!r} is malformed")


def _plain(value: object) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} does not go into a telemetry message")
