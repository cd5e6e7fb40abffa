"""Answers to callers who may leave at any moment: what runs for them ends with them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.serve.errors import ApiError
from engine.serve.guard import LEFT

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
SEND_S = 60.0
"""A caller that takes nothing for so long counts as gone."""


class CallerLeftError(Exception):
    """The connection has closed; nobody waits for the answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` as long as its caller is there.

    Raises:
        CallerLeftError: the caller has left; `work` was cancelled and has ended.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise CallerLeftError
    finally:
        for task in (working, leaving):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


class EventStream(Response):
    """Server-sent events, ended by `[DONE]`, or by an error event if the engine fails."""

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncIterator[dict[str, Any]], request: Request, ended: Callable[[], None]
    ) -> None:
        """Send `chunks` and call `ended` however that goes."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks, self._audit, self._ended = chunks, request.state.audit, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end, or until the caller has left."""
        try:
            await while_connected(receive, self._send_all(send))
        except (CallerLeftError, TimeoutError):
            self._audit.outcome = LEFT
        finally:
            self._ended()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        try:
            async for chunk in self._chunks:
                async with asyncio.timeout(SEND_S):
                    await send(_body(event(chunk)))
        except ApiError as failure:
            self._audit.outcome, self._audit.detail = str(failure.status), failure.code
            await send(_body(event(failure.body)))
        await send(_body(DONE, more=False))


def event(content: dict[str, Any]) -> bytes:
    """Return one server-sent event."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + text.encode() + b"\n\n"


def _body(data: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
