"""One viewer as the engine sees it: who it is, what it still has to be sent, what it has drawn.

Frames do not queue: a viewer holds at most the message being written and the newest frame, and gets
that one when it has drawn the last or `PATIENCE_S` later. Everything here runs on the stream's one
thread and never waits.
"""

from __future__ import annotations

import secrets
import socket
from collections import deque

from engine.runtime.telemetry.wire import (
    MAX_HELLO_BYTES,
    MAX_REQUEST_BYTES,
    Kind,
    Message,
    Splitter,
    WireError,
    encode,
    proof,
    proves,
)

PATIENCE_S = 0.5
"""After this long without an acknowledgement the next frame is sent anyway."""
HELLO_S = 5.0
"""How long a connection may take to prove the key."""
STUCK_S = 30.0
"""A viewer that takes no byte for this long is let go."""
MAX_REPLIES = 64
_CHUNK = 1 << 16


class Viewer:
    """The engine's end of one connection."""

    def __init__(self, connection: socket.socket, key: bytes, now: float) -> None:
        self.connection = connection
        self.proven = False
        """Whether the other end has shown that it has the key."""
        self.closing: str | None = None
        """Why the connection ends once its last bytes are out; None while it lives."""
        self.sent_seq = 0
        self.drawn_seq = 0
        """The highest seq the viewer says it has drawn."""
        self.num_sent = 0
        self.num_dropped = 0
        """Frames replaced by a newer one before they could be sent."""
        self._key = key
        self._nonce = secrets.token_hex(16)
        self._splitter = Splitter(MAX_HELLO_BYTES)
        self._out: memoryview | None = None
        self._replies: deque[bytes] = deque()
        self._frame: tuple[int, bytes] | None = None
        self._sent_at = -PATIENCE_S
        self._opened_at = self._moved_at = now
        self._replies.append(encode(Message(Kind.CHALLENGE, meta={"nonce": self._nonce})))

    @property
    def writing(self) -> bool:
        """Whether bytes wait for room in the socket."""
        return self._out is not None

    def read(self) -> list[Message]:
        """Take what has arrived; return the control messages in it.

        Raises:
            WireError: the other end broke the protocol or does not have the key.
            OSError: the connection is gone.
        """
        try:
            data = self.connection.recv(_CHUNK)
        except (BlockingIOError, InterruptedError):
            return []
        if not data:
            raise ConnectionResetError("closed by the viewer")
        controls = []
        for message in self._splitter.feed(data):
            if not self.proven:
                self._on_hello(message)
            elif message.kind is Kind.ACK:
                self.drawn_seq = max(self.drawn_seq, min(message.seq, self.sent_seq))
            elif message.kind is Kind.CONTROL:
                controls.append(message)
            else:
                raise WireError(f"a viewer does not send {message.kind.name}")
        return controls

    def offer(self, seq: int, frame: bytes) -> None:
        """Make `frame` the next one to send, in place of one that is still waiting."""
        if not self.proven or self.closing:
            return
        if self._frame is not None:
            self.num_dropped += 1
        self._frame = (seq, frame)

    def reply(self, message: Message) -> None:
        """Queue an answer; a viewer that asks without reading is let go."""
        if len(self._replies) >= MAX_REPLIES:
            raise WireError(f"{MAX_REPLIES} answers are waiting to be read")
        self._replies.append(encode(message))

    def refuse(self, reason: str) -> None:
        """Say why, then close."""
        self._frame = None
        self._replies.append(encode(Message(Kind.REFUSED, meta={"reason": reason})))
        self.closing = reason

    def pump(self, now: float) -> None:
        """Send what may be sent, as far as the socket takes it.

        Raises:
            OSError: the connection is gone or stuck.
        """
        while self._out is not None or self._next(now):
            assert self._out is not None
            try:
                sent = self.connection.send(self._out)
            except (BlockingIOError, InterruptedError):
                break
            self._moved_at = now
            self._out = self._out[sent:] if sent < len(self._out) else None
        if self._out is None:
            self._moved_at = now
            if self.closing:
                raise ConnectionAbortedError(self.closing)
        if now - self._moved_at > STUCK_S or (not self.proven and now - self._opened_at > HELLO_S):
            raise ConnectionAbortedError("the viewer takes too long")

    def _next(self, now: float) -> bool:
        """Choose the next message to write: answers first, then the newest frame if it is time."""
        if self._replies:
            self._out = memoryview(self._replies.popleft())
            return True
        drawn = self.drawn_seq >= self.sent_seq
        if self._frame is None or not (drawn or now - self._sent_at >= PATIENCE_S):
            return False
        self.sent_seq, frame = self._frame
        self._frame, self._sent_at = None, now
        self.num_sent += 1
        self._out = memoryview(frame)
        return True

    def _on_hello(self, message: Message) -> None:
        if message.kind is not Kind.HELLO:
            raise WireError("the first message must prove the key")
        if not proves(self._key, "viewer", self._nonce, message.meta.get("proof")):
            raise WireError("the key is wrong")
        nonce = message.meta.get("nonce")
        if not isinstance(nonce, str) or not nonce.isascii():
            raise WireError("the viewer's nonce is malformed")
        self.proven = True
        self._splitter.max_bytes = MAX_REQUEST_BYTES
        self.reply(Message(Kind.WELCOME, meta={"proof": proof(self._key, "engine", nonce)}))
