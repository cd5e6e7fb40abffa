"""The viewer's side of the stream: connects, reads frames, says what it has drawn, reconnects.

A thread of its own; `on_frame` runs there, and returning from it means "drawn".
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from engine.errors import RequestError
from engine.runtime.telemetry.wire import (
    MAX_FRAME_BYTES,
    Kind,
    Message,
    Splitter,
    WireError,
    encode,
    proof,
    proves,
)

CONNECTING, LIVE, GONE, REFUSED = "connecting", "live", "gone", "refused"
"""The states of a client: not yet connected, receiving, lost after it was live, turned away."""
_CHUNK = 1 << 18


class TelemetryClient:
    """Follows one engine's telemetry; `state` and `reason` say how that goes."""

    def __init__(
        self,
        address: tuple[str, int],
        key: bytes,
        *,
        on_frame: Callable[[Message], None],
        retry_s: tuple[float, float] = (0.1, 2.0),
    ) -> None:
        self.address = address
        self.state = CONNECTING
        self.reason = "waiting for the engine"
        self._key = key
        self._on_frame = on_frame
        self._retry_s = retry_s
        self._closing = threading.Event()
        self._sending = threading.Lock()
        self._connection: socket.socket | None = None
        self._numbers = itertools.count(1)
        self._answers: dict[int, Future[dict[str, Any]]] = {}
        self._thread = threading.Thread(target=self._run, name="telemetry-client", daemon=True)

    def start(self) -> None:
        """Begin to connect."""
        self._thread.start()

    def close(self) -> None:
        """Disconnect and end the thread."""
        self._closing.set()
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def control(self, action: str, *, timeout_s: float = 5.0, **detail: Any) -> dict[str, Any]:
        """Ask the engine to do something; return its answer, arrays among its values.

        Raises:
            RequestError: the engine refused (its reason), is not connected, or did not answer.
        """
        number = next(self._numbers)
        answer: Future[dict[str, Any]] = Future()
        self._answers[number] = answer
        try:
            meta = {"id": number, "action": action, "detail": detail}
            if self.state != LIVE or not self._send(Message(Kind.CONTROL, meta=meta)):
                raise RequestError(f"{action} was not sent: the engine is not connected.")
            return answer.result(timeout_s)
        except FutureTimeoutError:
            raise RequestError(f"{action} was not answered within {timeout_s:g} s.") from None
        finally:
            self._answers.pop(number, None)

    # ---- the client's thread

    def _run(self) -> None:
        wait_s, longest_s = self._retry_s
        while not self._closing.is_set():
            try:
                self._follow()
            except (OSError, WireError) as fault:
                was_live = self.state == LIVE
                if isinstance(fault, WireError):
                    self.state, self.reason = REFUSED, str(fault)
                elif was_live:
                    self.state, self.reason = GONE, "the engine has ended"
                if was_live:
                    wait_s = self._retry_s[0]
            self._fail_answers()
            self._closing.wait(wait_s)
            wait_s = min(longest_s, 2 * wait_s)

    def _follow(self) -> None:
        """Connect, prove the key, and read until the connection ends."""
        with socket.create_connection(self.address, timeout=5.0) as connection:
            self._connection = connection
            splitter = Splitter(MAX_FRAME_BYTES)
            nonce = secrets.token_hex(16)
            try:
                while not self._closing.is_set():
                    try:
                        data = connection.recv(_CHUNK)
                    except TimeoutError:
                        if self.state != LIVE:
                            raise
                        # A live engine that is silent is stalled, not gone: keep listening.
                        continue
                    if not data:
                        raise ConnectionResetError("closed by the engine")
                    self._take(splitter.feed(data), nonce)
            finally:
                self._connection = None

    def _take(self, messages: list[Message], nonce: str) -> None:
        frames = [message for message in messages if message.kind is Kind.FRAME]
        for message in messages:
            if message.kind is Kind.CHALLENGE:
                given = proof(self._key, "viewer", str(message.meta.get("nonce")))
                self._send(Message(Kind.HELLO, meta={"proof": given, "nonce": nonce}))
            elif message.kind is Kind.REFUSED:
                raise WireError(str(message.meta.get("reason")))
            elif message.kind is Kind.WELCOME:
                if not proves(self._key, "engine", nonce, message.meta.get("proof")):
                    raise WireError("whoever listens there does not have the key")
                self.state, self.reason = LIVE, ""
            elif message.kind is Kind.REPLY:
                self._settle(message)
        if frames and self.state == LIVE:
            # Several at once mean that this end was late: only the newest counts.
            self._on_frame(frames[-1])
            self._send(Message(Kind.ACK, seq=frames[-1].seq, time_s=time.time()))

    def _send(self, message: Message) -> bool:
        connection = self._connection
        if connection is None:
            return False
        try:
            with self._sending:
                connection.sendall(encode(message))
        except OSError:
            return False
        return True

    def _settle(self, message: Message) -> None:
        meta = message.meta
        answer = self._answers.pop(meta.get("id", 0), None)
        if answer is None:
            return
        if meta.get("ok"):
            answer.set_result({**(meta.get("result") or {}), **message.arrays})
        else:
            answer.set_exception(RequestError(str(meta.get("reason"))))

    def _fail_answers(self) -> None:
        for number in tuple(self._answers):
            answer = self._answers.pop(number, None)
            if answer is not None:
                answer.set_exception(RequestError("the engine went away before it answered."))
