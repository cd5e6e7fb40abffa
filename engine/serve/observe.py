"""The routes of those who watch: metrics, the state, and the frames of the dashboard."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from engine.runtime.telemetry.wire import Kind, Message, WireError, decode, encode
from engine.serve.alerts import RULES
from engine.serve.errors import ApiError
from engine.serve.guard import needs
from engine.serve.service import Service
from engine.serve.tally import BALANCES

PERIOD_S = 0.08
PATIENCE_S = 0.5
"""After this long without an acknowledgement the next frame is sent anyway."""
STUCK_S = 30.0
"""A watcher that takes no frame for so long is let go."""
LENGTH_BYTES = 4


def routes(service: Service) -> APIRouter:
    """Return the routes of one service."""
    router = APIRouter(dependencies=[needs("observe")])
    watchers = set[WebSocket]()

    @router.get("/metrics")
    async def metrics() -> Response:
        """Return all metrics in Prometheus's text format."""
        text = await asyncio.to_thread(service.monitor.metrics.text)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @router.get("/v1/status")
    async def status() -> dict[str, Any]:
        """Return what is in force and how it went since the start."""
        return state(service)

    @router.websocket("/v1/telemetry")
    async def telemetry(websocket: WebSocket) -> None:
        """Send the dashboard's frames, the newest whenever the watcher has drawn the last."""
        if len(watchers) >= service.config.limits.watchers:
            raise ApiError(429, "Too many watch already.", code="too_many_watchers")
        await websocket.accept()
        watchers.add(websocket)
        try:
            await _watched(service, websocket)
        finally:
            watchers.discard(websocket)

    return router


def state(service: Service) -> dict[str, Any]:
    """Return the state of a service, fit for JSON, without anything a request said."""
    monitor, books = service.monitor, service.loop.books
    model, recent = service.engine.model_config, monitor.tally.recent()
    return {
        "ready": service.reason() is None,
        "reason": service.reason(),
        "model": service.config.model_name,
        "model_shape": {
            "moe_layers": list(model.moe_layers),
            "experts": model.num_experts,
            "top_k": model.top_k,
            "max_model_len": service.engine.max_model_len,
        },
        "scheme": service.engine.config.scheme,
        "draft": Path(draft).resolve().name if (draft := service.engine.config.draft) else None,
        "deterministic": service.engine.config.deterministic,
        "ranks": {
            "places": service.engine.config.num_ranks,
            "expected": sorted(monitor.health.expected_ranks),
            "living": sorted(monitor.health.living_ranks),
        },
        "requests": {
            "started": books.started,
            "finished": books.finished,
            "aborted": books.aborted,
            "failed": books.failed,
            "running": books.running,
        },
        "engine": service.engine.stats().as_dict(),
        "totals": monitor.tally.summary(),
        "balance": {
            name: {"value": value, "formula": BALANCES[name]}
            for name, value in recent.balance.items()
        },
        "overhead_share": recent.overhead_share,
        "communication_errors": monitor.health.communication_errors,
        "drill": monitor.drill.facts(),
        "alerts": [
            {"name": rule.name, "severity": rule.severity, "summary": rule.summary}
            for rule in RULES
            if rule.name in monitor.alerts.active
        ],
        "log": service.journal.summary(),
    }


async def _watched(service: Service, websocket: WebSocket) -> None:
    drawn = _Drawn()
    reading = asyncio.ensure_future(drawn.follow(websocket))
    sent_seq, sent_at = 0, 0.0
    try:
        while not reading.done() and not service.loop.draining:
            frame, now = service.telemetry.latest, time.monotonic()
            due = drawn.seq >= sent_seq or now - sent_at >= PATIENCE_S
            if frame is not None and frame.seq > sent_seq and due:
                sent_seq, sent_at = frame.seq, now
                # A websocket frames messages itself; the stream's length in front has no use.
                body = encode(frame)[LENGTH_BYTES:]
                await asyncio.wait_for(websocket.send_bytes(body), STUCK_S)
            await asyncio.wait({reading}, timeout=PERIOD_S)
    except (TimeoutError, WebSocketDisconnect, RuntimeError):
        pass  # the watcher has left or is stuck
    finally:
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await reading
        with contextlib.suppress(RuntimeError, WebSocketDisconnect):  # closed by the other end
            await websocket.close()


class _Drawn:
    """The highest frame a watcher says it has drawn."""

    def __init__(self) -> None:
        self.seq = 0

    async def follow(self, websocket: WebSocket) -> None:
        """Read acknowledgements until the watcher leaves or says anything else."""
        while True:
            try:
                message: Message = decode(await websocket.receive_bytes())
            except (WireError, WebSocketDisconnect, KeyError, RuntimeError):
                return
            if message.kind is not Kind.ACK:
                return
            self.seq = max(self.seq, message.seq)
