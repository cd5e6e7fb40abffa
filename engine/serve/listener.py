"""The socket and the thread on which uvicorn serves an application."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from engine.errors import ConfigError, MachineError
from engine.serve.config import ServeConfig

READY_S = 15.0
GRACE_S = 5
"""How long answers may still take to reach their callers at the end."""


class Beside(Protocol):
    """Something that serves on the same event loop."""

    async def start(self) -> None:
        """Begin; what it raises ends the start."""

    async def stop(self) -> None:
        """Let calls under way end, then end."""


class Listener:
    """Serves one application until it is closed."""

    def __init__(self, app: ASGIApp, config: ServeConfig, beside: Beside | None = None) -> None:
        """Bind, and begin to answer.

        Raises:
            MachineError: the address cannot be had.
            ConfigError: the TLS files are no certificate and key.
        """
        self._socket = _bound(config.host, config.port)
        self.tls = config.tls_cert is not None
        try:
            settings = _settings(app, config)
        except (OSError, ssl.SSLError) as wrong:
            self._socket.close()
            raise ConfigError(f"tls_cert and tls_key cannot be used: {wrong}.") from None
        self._server, self._beside = uvicorn.Server(settings), beside
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._thread.start()
        until = time.monotonic() + READY_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > until:
                self.close()
                raise MachineError(f"the HTTP server did not start: {self._failure or 'too slow'}.")
            time.sleep(0.005)

    @property
    def port(self) -> int:
        """The port in use."""
        return int(self._socket.getsockname()[1])

    @property
    def alive(self) -> bool:
        """Whether it still answers."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Let the answers under way go out, then end."""
        self._server.should_exit = True
        self._thread.join(GRACE_S + READY_S)
        self._socket.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as failure:  # noqa: BLE001 - reported by whoever waits for the start
            self._failure = failure

    async def _serve(self) -> None:
        if self._beside:
            await self._beside.start()
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            if self._beside:
                await self._beside.stop()


def _settings(app: ASGIApp, config: ServeConfig) -> uvicorn.Config:
    settings = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,  # the audit log says more, and no paths that callers made up
        lifespan="off",
        proxy_headers=False,  # a caller must not choose the address it is known by
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
        # Above it uvicorn itself says 503, also to connections that never send a whole request.
        limit_concurrency=2 * config.limits.connections,
        ws_max_size=1 << 16,
        ssl_certfile=config.tls_cert,
        ssl_keyfile=config.tls_key,
    )
    settings.load()
    return settings


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        made = socket.create_server((host, port), family=family, backlog=1024)
        # asyncio sets this only on sockets that name their protocol, which accepted ones do not;
        # without it every answer's body waits for the acknowledgement of its head, some 40 ms.
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made
    except OSError as wrong:
        raise MachineError(
            f"{host}:{port} cannot be listened on ({wrong.strerror or wrong}); take another --port."
        ) from None
