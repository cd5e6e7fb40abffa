"""The engine's side of the stream: a sink that never waits and one thread that tells everybody.

`emit` appends to a bounded queue and returns. At most `max_hz` times a second the thread adds up
what came, encodes one frame and offers the same bytes to every viewer. Nothing a viewer does, slow,
dead, lying or gone, reaches the engine's thread.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from engine.errors import WorkbenchError
from engine.events import Event
from engine.runtime.telemetry.aggregate import Aggregator
from engine.runtime.telemetry.viewer import Viewer
from engine.runtime.telemetry.wire import DTYPES, Kind, Message, WireError, encode

Answer = Mapping[str, Any] | None
OnControl = Callable[[str, Mapping[str, Any]], "Answer | Future[Answer]"]
"""Takes action and detail on the stream's thread, quickly: work for the engine's thread is handed
over and answered with a Future. Raises a `WorkbenchError` to refuse, with the reason. An answer's
values are fit for JSON, or numpy arrays, which travel as they are."""

MAX_VIEWERS = 64
QUEUE_EVENTS = 8192
"""Events that may wait; when the thread falls behind, the oldest are dropped and counted."""
QUIET_S = 0.5
"""An engine that does nothing is reported this often, so that silence means trouble."""


class Telemetry:
    """A sink that serves what the engine does to viewers on this machine.

    Listens on loopback alone, on `port` or a free one, from the moment it is made. Whoever connects
    must prove the random `key` first.
    """

    def __init__(
        self,
        *,
        key: bytes | None = None,
        port: int = 0,
        max_hz: float = 12.5,
        on_control: OnControl | None = None,
        prompt_text: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.key = key or secrets.token_bytes(32)
        self.enabled = True
        self._on_control = on_control
        self._period_s = 1.0 / max_hz
        self._queue: deque[Event] = deque(maxlen=QUEUE_EVENTS)
        self._num_emitted = 0
        self._num_taken = 0
        self._aggregator = Aggregator(prompt_text)
        self._seq = 0
        self._frame: Message | None = None
        self._framed_at = 0.0
        self._busy_share = 0.0
        self._failure: str | None = None
        self._facts: dict[str, Any] = {}
        self._viewers: set[Viewer] = set()
        self._pending: list[tuple[Viewer, int, Future[Answer]]] = []
        self._listener = socket.create_server(("127.0.0.1", port), backlog=MAX_VIEWERS)
        self._listener.setblocking(False)
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()

    @property
    def address(self) -> tuple[str, int]:
        """Where viewers connect."""
        host, port = self._listener.getsockname()
        return host, port

    @property
    def latest(self) -> Message | None:
        """The newest frame, built whether or not anybody watches."""
        return self._frame

    @property
    def num_viewers(self) -> int:
        """Viewers that have proven the key."""
        return sum(viewer.proven for viewer in tuple(self._viewers))

    @property
    def num_dropped(self) -> int:
        """Events lost because the stream's thread fell behind."""
        return max(0, self._num_emitted - self._num_taken - len(self._queue))

    def show_prompts(self, prompt_text: Callable[[Sequence[int]], str]) -> None:
        """Show each new request's prompt, turned into text by `prompt_text` on the stream's thread.

        Apart from the constructor because the engine, which has the tokenizer, is made later.
        """
        self._aggregator.prompt_text = prompt_text

    def note(self, **facts: Any) -> None:
        """Add facts that go into every frame as `meta["facts"]`; they must be fit for JSON."""
        self._facts = {**self._facts, **facts}

    def emit(self, event: Event) -> None:
        """Take one event; costs an append."""
        self._queue.append(event)
        self._num_emitted += 1

    def close(self) -> None:
        """End the stream: viewers see the connection close. Closing twice is fine."""
        if not self.enabled:
            return
        self.enabled = False
        self._wake.close()
        self._thread.join(timeout=5.0)

    # ---- the stream's thread

    def _run(self) -> None:
        due = time.monotonic()
        while self.enabled:
            for ready, mask in self._selector.select(max(0.0, due - time.monotonic())):
                if ready.fileobj is self._listener:
                    self._accept()
                elif ready.data is not None:
                    self._serve(ready.data, mask)
            now = time.monotonic()
            if now >= due:
                self._guarded_tick(now)
                due = max(due + self._period_s, now)
        for viewer in tuple(self._viewers):
            self._drop(viewer)
        self._selector.close()
        self._listener.close()
        self._woken.close()

    def _guarded_tick(self, now: float) -> None:
        """Run one tick; a fault in counting or encoding is reported in the frame, not raised."""
        try:
            self._tick(now)
        except Exception as fault:  # noqa: BLE001 - the stream outlives whatever it is fed
            self._failure = f"{type(fault).__name__}: {fault}"

    def _tick(self, now: float) -> None:
        began = time.thread_time()
        events = []
        with contextlib.suppress(IndexError):
            while True:
                events.append(self._queue.popleft())
        self._num_taken += len(events)
        self._aggregator.add(events)
        self._answer_pending()
        if events or now - self._framed_at >= QUIET_S:
            self._publish(now)
        for viewer in tuple(self._viewers):
            self._pump(viewer, now)
        share = (time.thread_time() - began) / self._period_s
        self._busy_share += 0.1 * (share - self._busy_share)

    def _publish(self, now: float) -> None:
        """Build the next frame, encode it once, offer it to all."""
        self._seq += 1
        frame = self._aggregator.frame(self._seq, time.time())
        looking = {
            "viewers": self.num_viewers,
            "frames_dropped": sum(viewer.num_dropped for viewer in self._viewers),
            "events_dropped": self.num_dropped,
            "thread_share": self._busy_share,
            "failure": self._failure,
        }
        frame = replace(frame, meta={**frame.meta, "facts": self._facts, "looking": looking})
        self._frame, self._framed_at = frame, now
        if self._viewers:
            data = encode(frame)
            for viewer in self._viewers:
                viewer.offer(self._seq, data)

    def _accept(self) -> None:
        try:
            connection, peer = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        if not ipaddress.ip_address(peer[0]).is_loopback:
            connection.close()
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        viewer = Viewer(connection, self.key, time.monotonic())
        if len(self._viewers) >= MAX_VIEWERS:
            viewer.refuse(f"{MAX_VIEWERS} viewers are connected already; close one first.")
        self._viewers.add(viewer)
        self._selector.register(connection, selectors.EVENT_READ, viewer)
        self._pump(viewer, time.monotonic())

    def _serve(self, viewer: Viewer, mask: int) -> None:
        """Read from and write to one viewer; whatever is wrong with it ends it alone."""
        try:
            if mask & selectors.EVENT_READ:
                for control in viewer.read():
                    self._on_message(viewer, control)
        except WireError as fault:
            viewer.refuse(str(fault))
        except OSError:
            self._drop(viewer)
            return
        except Exception as fault:  # noqa: BLE001 - one viewer's message must not end the stream
            self._failure = f"{type(fault).__name__}: {fault}"
            self._drop(viewer)
            return
        self._pump(viewer, time.monotonic())

    def _pump(self, viewer: Viewer, now: float) -> None:
        if viewer not in self._viewers:
            return
        try:
            viewer.pump(now)
            # While it is being refused nothing more is read: only the last bytes go out.
            mask = selectors.EVENT_WRITE if viewer.writing else 0
            if not viewer.closing:
                mask |= selectors.EVENT_READ
            self._selector.modify(viewer.connection, mask, viewer)
        except OSError:
            self._drop(viewer)

    def _drop(self, viewer: Viewer) -> None:
        self._viewers.discard(viewer)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(viewer.connection)
        viewer.connection.close()

    # ---- control messages

    def _on_message(self, viewer: Viewer, message: Message) -> None:
        number, action = message.meta.get("id"), message.meta.get("action")
        detail = message.meta.get("detail", {})
        if not (isinstance(number, int) and isinstance(action, str) and isinstance(detail, dict)):
            raise WireError("a control message needs an id, an action and a detail")
        answer: Future[Answer] = Future()
        try:
            if self._on_control is None:
                raise WorkbenchError("this engine takes no control messages.")
            result = self._on_control(action, detail)
            if isinstance(result, Future):
                answer = result
            else:
                answer.set_result(result)
        except Exception as fault:  # noqa: BLE001 - answered, see _reply
            answer.set_exception(fault)
        self._pending.append((viewer, number, answer))
        self._answer_pending()

    def _answer_pending(self) -> None:
        done = [entry for entry in self._pending if entry[2].done()]
        self._pending = [entry for entry in self._pending if not entry[2].done()]
        for viewer, number, answer in done:
            if viewer in self._viewers and not viewer.closing:
                try:
                    viewer.reply(_reply(number, answer))
                except WireError as fault:
                    viewer.refuse(str(fault))


def _reply(number: int, answer: Future[Answer]) -> Message:
    """Turn an answer into a message; only a user's fault is told in its own words."""
    try:
        result = dict(answer.result() or {})
        arrays = {name: result.pop(name) for name in list(result) if _is_array(result[name])}
        json.dumps(result, allow_nan=False)
    except WorkbenchError as refusal:
        return Message(Kind.REPLY, meta={"id": number, "ok": False, "reason": str(refusal)})
    except Exception as fault:  # noqa: BLE001 - told without its text, which may hold anything
        reason = f"the engine failed to do this ({type(fault).__name__})."
        return Message(Kind.REPLY, meta={"id": number, "ok": False, "reason": reason})
    meta = {"id": number, "ok": True, "result": result}
    return Message(Kind.REPLY, meta=meta, arrays=arrays)


def _is_array(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.str in DTYPES and value.ndim <= 4
