"""The gate before every route: networks, keys, rates, sizes, and the audit log.

Pure ASGI, outermost, for HTTP and websockets alike. It denies by default: only the paths of
`PUBLIC` are open, spelt exactly so; any other path, existing or not, asks for a key first. What a
key may do is said by each route (`needs`).
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any
from urllib.parse import urlsplit

from fastapi import Depends
from fastapi.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.serve import errors
from engine.serve.audit import Entry
from engine.serve.auth import Caller
from engine.serve.config import LOOPBACK
from engine.serve.errors import ApiError
from engine.serve.gate import Gate

PUBLIC = frozenset({"/healthz", "/readyz"})
LINGER = 16
"""How many times the longest body is read before a caller is cut off."""
LEFT = "aborted"
"""The outcome of a call whose caller left before the answer was complete."""


class Guard:
    """Lets calls through to `app`, or answers for it."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app, self.gate = app, gate
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Guard one call."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        entry = Entry(source=_address(scope), operation=_operation(scope, known=False))
        scope.setdefault("state", {})["audit"] = entry
        watched = _Watched(send, entry)
        self._open += 1
        try:
            await self._guarded(scope, receive, watched, entry)
        except ApiError as refusal:
            entry.outcome, entry.detail = str(refusal.status), entry.detail or refusal.code
            if not watched.begun:
                await _answer(scope, receive, send, refusal)
        except asyncio.CancelledError:
            entry.outcome = LEFT
            raise
        finally:
            self._open -= 1
            if scope.get("route") is not None:
                entry.operation = _operation(scope, known=True)
            entry.duration_ms = (time.monotonic() - began) * 1e3
            entry.outcome = entry.outcome or LEFT
            if scope["path"] not in PUBLIC:
                failed = entry.outcome.isdigit() and int(entry.outcome) >= 400
                self.gate.close_entry(entry, failed=failed)

    async def _guarded(self, scope: Scope, receive: Receive, send: _Watched, entry: Entry) -> None:
        gate, limits = self.gate, self.gate.config.limits
        gate.check_network(entry.source)
        if scope["path"] in PUBLIC:
            await self._app(scope, receive, send)
            return
        if self._open > limits.connections:
            raise errors.overloaded(limits.connections)
        headers = dict(scope["headers"])
        if gate.keys is None:
            _check_local(headers)
        authorization = headers.get(b"authorization", b"").decode("latin-1")
        caller = gate.caller(entry.source, authorization)
        entry.key = caller.key_id
        scope["state"]["caller"] = caller
        gate.check_rate(caller, entry.source)
        if scope["type"] == "http":
            receive = await self._body(scope, receive, entry)
        await self._app(scope, receive, send)

    async def _body(self, scope: Scope, receive: Receive, entry: Entry) -> Receive:
        """Read the body within its limits and return what gives it out again.

        One that is too large is read to its end, up to a bound, and dropped: a caller who is still
        sending would not see the answer otherwise.
        """
        limit, most_s = self.gate.config.limits.body_bytes, self.gate.config.limits.body_s
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(most_s):
                more = True
                while more and entry.input_bytes <= LINGER * limit:
                    message = await receive()
                    if message["type"] != "http.request":
                        entry.outcome = LEFT
                        raise ApiError(400, "The body did not arrive.", code="incomplete_body")
                    entry.input_bytes += len(message.get("body", b""))
                    if entry.input_bytes <= limit:
                        parts.append(message.get("body", b""))
                    more = message.get("more_body", False)
        except TimeoutError:
            raise ApiError(408, "The body took too long.", code="body_timeout") from None
        if entry.input_bytes > limit:
            raise errors.body_too_large(limit)
        return _replay(b"".join(parts), receive)


class _Watched:
    """Passes messages on and notes how the call ended."""

    def __init__(self, send: Send, entry: Entry) -> None:
        self._send, self._entry, self.begun = send, entry, False
        self._status = ""

    async def __call__(self, message: Message) -> None:
        kind = message["type"]
        if kind.endswith("http.response.start"):  # of a refused websocket, too
            self.begun, self._status = True, str(message["status"])
        elif kind.endswith("http.response.body") and not message.get("more_body", False):
            self._entry.outcome = self._entry.outcome or self._status
        elif kind in ("websocket.accept", "websocket.close"):
            self.begun = True
            self._entry.outcome = str(101 if kind == "websocket.accept" else message["code"])
        await self._send(message)


def needs(scope: str) -> Any:
    """Return the dependency of a route that only keys with this scope may call."""

    def check(connection: HTTPConnection) -> Caller:
        caller: Caller = connection.state.caller
        if scope not in caller.scopes:
            raise errors.forbidden(scope)
        return caller

    check.scope = scope  # type: ignore[attr-defined]
    return Depends(check)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body once and then waits for the caller to leave."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _check_local(headers: dict[bytes, bytes]) -> None:
    """Without keys, let in only what is meant for this machine.

    A page in a browser here could otherwise reach the service through a name that resolves to
    loopback, or by a form: the first is told by `Host`, the second by `Origin`.
    """
    host = urlsplit(f"//{headers.get(b'host', b'').decode('latin-1')}").hostname or ""
    origin = headers.get(b"origin")
    foreign = origin is not None and urlsplit(origin.decode("latin-1")).hostname not in LOOPBACK
    if host not in LOOPBACK or foreign:
        raise ApiError(403, "Without keys only this machine may call.", code="foreign_origin")


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else "-"


def _operation(scope: Scope, *, known: bool) -> str:
    """Name the call by its route; what is no route of ours is not repeated."""
    method = scope.get("method", "WEBSOCKET")
    method = method if method in _METHODS else "?"
    path = scope["path"] if scope["path"] in PUBLIC else "(no route)"
    return f"{method} {scope['route'].path if known else path}"


_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "WEBSOCKET")


async def _answer(scope: Scope, receive: Receive, send: Send, refusal: ApiError) -> None:
    """Answer for the application, also where a websocket was asked for."""
    kind = "http"
    if scope["type"] == "websocket":
        if "websocket.http.response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": 1008})
            return
        kind = "websocket.http"
    body = json.dumps(refusal.body).encode()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        **refusal.headers,
    }
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    start = f"{kind}.response.start"
    await send({"type": start, "status": refusal.status, "headers": raw})
    await send({"type": f"{kind}.response.body", "body": body})
