"""Readers of the dashboard without a browser: they open a page and say that they have drawn it.

A visitor speaks as much of Bokeh's websocket protocol as that takes: it pulls the document, and for
every frame of a map and every set of values it is sent, it answers as `live_map.js` and `page.js`
do once they have drawn. Nothing is drawn, so many fit on one core. Needs tornado, which Panel
brings.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

from engine.errors import MachineError

_TOKEN = re.compile(r'"token":"([^"]+)"')
_SKELETON = re.compile(r"<!-- (\d+) -->")
_FRAME_MAGIC = b"TRM1"
_OPEN_S = 30.0
_CLOSE_S = 5.0


class Visitor:
    """One reader of one page."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.shown = 0
        """Frames of maps that it was sent and has acknowledged."""
        self.filled = 0
        """Sets of values, likewise."""
        self.first_frame_s: float | None = None
        """Seconds from asking for the page to its first frame."""
        self._socket: Any = None
        self._began = 0.0
        self._built = 0
        self._number = 0

    @property
    def connected(self) -> bool:
        """Whether its websocket was opened."""
        return self._socket is not None

    async def open(self) -> None:
        """Open the page and its websocket.

        Raises:
            MachineError: the server does not answer as a dashboard does.
        """
        from tornado.httpclient import AsyncHTTPClient, HTTPRequest
        from tornado.websocket import websocket_connect

        self._began = time.monotonic()
        asker = AsyncHTTPClient(force_instance=True)
        try:
            page = await asker.fetch(self.url, request_timeout=_OPEN_S)
        finally:
            asker.close()
        found = _TOKEN.search(page.body.decode())
        if found is None:
            raise MachineError(f"{self.url} is not a page of the dashboard.")
        path = self.url.partition("?")[0].rstrip("/")
        request = HTTPRequest(f"{path.replace('http', 'ws', 1)}/ws", connect_timeout=_OPEN_S)
        self._socket = await websocket_connect(request, subprotocols=["bokeh", found.group(1)])
        await self._receive()  # an ACK: what is sent before it would be lost
        await self._send("PULL-DOC-REQ", {})
        await self._tell({"kind": "MessageSent", "msg_type": "bokeh_event", "msg_data": {
            "type": "event", "name": "document_ready", "values": {"type": "map", "entries": []},
        }})  # fmt: skip

    async def follow(self) -> None:
        """Answer what arrives until the connection is closed."""
        while (message := await self._receive()) is not None:
            kind, content, buffers = message
            if kind == "PULL-DOC-REPLY":
                if any(data.startswith(_FRAME_MAGIC) for data in buffers.values()):
                    self._note_frame()
            elif kind == "PATCH-DOC":
                for event in content["events"]:
                    await self._take(event, buffers)

    def close(self) -> None:
        """Leave the page; on the thread that opened it."""
        if self.connected:
            self._socket.close()

    async def _take(self, event: dict[str, Any], buffers: dict[str, bytes]) -> None:
        """Answer one change as the page would."""
        model, name, new = event.get("model"), event.get("attr"), event.get("new")
        if name == "frame" and isinstance(new, dict):
            data = buffers.get(new["data"]["id"], b"")
            if data.startswith(_FRAME_MAGIC):
                self._note_frame()
                await self._set(model, ack=struct.unpack_from("<I", data, 4)[0])
        elif name == "skeleton" and (number := _SKELETON.match(str(new))):
            self._built = int(number.group(1))
        elif name == "values" and isinstance(new, dict):
            self.filled += 1
            await self._set(model, drawn=dict(new["entries"]).get("beat", 0), built=self._built)

    def _note_frame(self) -> None:
        self.shown += 1
        if self.first_frame_s is None:
            self.first_frame_s = time.monotonic() - self._began

    async def _set(self, model: Any, **values: Any) -> None:
        for name, value in values.items():
            await self._tell({"kind": "ModelChanged", "model": model, "attr": name, "new": value})

    async def _tell(self, event: dict[str, Any]) -> None:
        await self._send("PATCH-DOC", {"events": [event]})

    async def _send(self, kind: str, content: dict[str, Any]) -> None:
        from tornado.websocket import WebSocketClosedError

        self._number += 1
        header = {"msgid": str(self._number), "msgtype": kind}
        with contextlib.suppress(WebSocketClosedError):
            for part in (header, {}, content):
                await self._socket.write_message(json.dumps(part))

    async def _receive(self) -> tuple[str, Any, dict[str, bytes]] | None:
        """Return kind, content and buffers of the next message; None once it is closed."""
        parts = [await self._socket.read_message() for _ in range(3)]
        if None in parts:
            return None
        header, content = json.loads(parts[0]), json.loads(parts[2])
        buffers = {}
        for _ in range(header.get("num_buffers", 0)):
            name, data = await self._socket.read_message(), await self._socket.read_message()
            if name is None or data is None:
                return None
            buffers[json.loads(name)["id"]] = data
        return header["msgtype"], content, buffers


@contextlib.contextmanager
def visitors(url: str, count: int, *, with_map: bool = True) -> Iterator[list[Visitor]]:
    """Let `count` visitors follow a page meanwhile, on a thread of their own.

    They arrive all at once; those of a page with a map have a frame each before this goes on.

    Raises:
        MachineError: a page did not open, or a map stayed empty.
    """
    readers = [Visitor(url) for _ in range(count)]
    opened = threading.Event()
    hold: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    faults: list[Exception] = []

    async def run() -> None:
        leave = asyncio.Event()
        hold.append((asyncio.get_running_loop(), leave))
        try:
            await asyncio.gather(*(reader.open() for reader in readers))
        except Exception as fault:  # noqa: BLE001 - told where the visitors were asked for
            faults.append(fault)
        following = [asyncio.create_task(reader.follow()) for reader in readers if reader.connected]
        opened.set()
        await leave.wait()
        for reader in readers:
            reader.close()
        if following:
            await asyncio.wait(following, timeout=_CLOSE_S)

    began = time.monotonic()
    thread = threading.Thread(target=lambda: asyncio.run(run()), name="visitors", daemon=True)
    thread.start()
    try:
        if not opened.wait(2 * _OPEN_S) or faults:
            raise MachineError(f"{url} did not open for {count} visitors: {faults or 'too slow'}.")
        while with_map and any(reader.first_frame_s is None for reader in readers):
            if time.monotonic() - began > 2 * _OPEN_S:
                raise MachineError(f"a map of {url} stayed empty.")
            time.sleep(0.01)
        yield readers
    finally:
        loop, leave = hold[0]
        loop.call_soon_threadsafe(leave.set)
        thread.join(2 * _CLOSE_S)
