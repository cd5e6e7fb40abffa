"""The gate before every gRPC method: the same networks, keys, rates and audit log as for HTTP.

Denies by default: only the standard health service is open. A method that is not there asks for a
key first, like any other. The code of a refusal travels in the trailing metadata `error-code`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from engine.serve.audit import Entry
from engine.serve.errors import ApiError, forbidden, not_found
from engine.serve.gate import Gate
from engine.serve.guard import LEFT

log = logging.getLogger("engine.serve")

PUBLIC = "/grpc.health.v1.Health/"
ROUTER = "/tokenrouter.v1.Router/"
SCOPES = {"Status": "observe", "Control": "operate"}
"""Methods of the router that need another scope than `infer`."""


class RpcGuard(grpc.aio.ServerInterceptor):
    """Wraps every method."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the method's handler behind the gate."""
        handler = await continuation(details)
        method = str(details.method)
        if handler is None:
            return grpc.unary_unary_rpc_method_handler(self._one(_missing, ""))
        inner = (
            handler.unary_unary
            or handler.unary_stream
            or handler.stream_unary
            or handler.stream_stream
        )
        guarded = (self._many if handler.response_streaming else self._one)(inner, method)
        make = _MAKE[bool(handler.request_streaming), bool(handler.response_streaming)]
        return make(guarded, handler.request_deserializer, handler.response_serializer)

    def _one(self, inner: Callable[..., Awaitable[Any]], method: str) -> Callable[..., Any]:
        async def call(request: Any, context: Any) -> Any:
            watched = _Watched(context, method)
            try:
                self._enter(watched, request)
                return await inner(request, watched)
            except BaseException as failure:  # noqa: BLE001 - told, written down, raised again
                await watched.failed(failure)
                raise
            finally:
                self._leave(watched)

        return call

    def _many(self, inner: Callable[..., Any], method: str) -> Callable[..., Any]:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            watched = _Watched(context, method)
            try:
                self._enter(watched, request)
                replies = inner(request, watched)
                if hasattr(replies, "__aiter__"):
                    async for reply in replies:
                        yield reply
                else:
                    await replies  # writes by itself
            except BaseException as failure:  # noqa: BLE001 - told, written down, raised again
                await watched.failed(failure)
                raise
            finally:
                self._leave(watched)

        return call

    def _enter(self, watched: _Watched, request: Any) -> None:
        entry, gate = watched.entry, self._gate
        gate.check_network(entry.source)
        if watched.method.startswith(PUBLIC):
            return
        metadata = {key: value for key, value in watched.context.invocation_metadata() or ()}
        caller = gate.caller(entry.source, metadata.get("authorization"))
        entry.key = caller.key_id
        gate.check_rate(caller, entry.source)
        scope = SCOPES.get(watched.method.removeprefix(ROUTER), "infer")
        if watched.method.startswith(ROUTER) and scope not in caller.scopes:
            raise forbidden(scope)
        if hasattr(request, "ByteSize"):
            entry.input_bytes = request.ByteSize()

    def _leave(self, watched: _Watched) -> None:
        entry = watched.entry
        entry.outcome = entry.outcome or "OK"
        entry.duration_ms = (time.monotonic() - watched.began) * 1e3
        if not watched.method.startswith(PUBLIC):
            self._gate.close_entry(entry, failed=entry.outcome not in ("OK", LEFT))


class _Watched:
    """A call's context with its audit entry; passes on whatever else is asked of it."""

    def __init__(self, context: Any, method: str) -> None:
        self.context, self.method, self.began = context, method, time.monotonic()
        self.entry = Entry(source=_address(context.peer()), operation=f"gRPC {method or '(none)'}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.context, name)

    async def failed(self, failure: BaseException) -> None:
        """Tell the caller in fixed words, and note the outcome."""
        if isinstance(failure, ApiError):
            self.entry.outcome, self.entry.detail = failure.grpc_code.name, failure.code
            trailing = (("error-code", failure.code),)
            await self.context.abort(failure.grpc_code, failure.message, trailing)
        elif isinstance(failure, asyncio.CancelledError | GeneratorExit):
            self.entry.outcome = LEFT
        elif isinstance(failure, grpc.aio.AbortError):
            self.entry.outcome = "refused"  # by the health or reflection service itself
        elif isinstance(failure, Exception):
            self.entry.outcome = "INTERNAL"
            log.error("a call failed inside the service", exc_info=failure)
            await self.context.abort(
                grpc.StatusCode.INTERNAL, "The service failed at this request."
            )


async def _missing(request: Any, context: Any) -> Any:
    raise not_found()


def _address(peer: str) -> str:
    """Return the address in `ipv4:127.0.0.1:5000` or `ipv6:%5B::1%5D:5000`."""
    kind, _, rest = peer.partition(":")
    host = rest.rpartition(":")[0] if kind in ("ipv4", "ipv6") else rest
    return host.replace("%5B", "").replace("%5D", "").strip("[]") or "-"


_MAKE = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
