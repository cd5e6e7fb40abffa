"""Screens that watch a drill's engine, and a crowd of them that never says what it has drawn.

They watch over a telemetry of the deployment's own, as any viewer would; the drill's commands go
over another one, so that a crowd can be sent away.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from typing import TYPE_CHECKING, Any

from engine.runtime.telemetry import Telemetry, TelemetryClient
from engine.runtime.telemetry.wire import Kind, Message, Splitter, encode, proof
from workbench.drills.jobs import Job

if TYPE_CHECKING:
    from workbench.drills.deployment import Deployment

_MOST_BYTES = 1 << 20


class Screens(Job):
    """Some screens on a wall that draw every frame, and a crowd that draws none."""

    does = "shows the engine on the screens of the floor"
    watches = True

    def __init__(self, name: str, count: int = 2) -> None:
        super().__init__(name)
        self.count, self.crowd = count, 0
        self._telemetry: Telemetry | None = None
        self._screens: list[TelemetryClient] = []
        self._silent: list[socket.socket] = []

    def start(self, deployment: Deployment) -> None:
        """Connect the screens, and the crowd if there is one."""
        if self.running:
            return
        super().start(deployment)
        self._telemetry = deployment.telemetry()
        address, key = self._telemetry.address, self._telemetry.key
        self._screens = [
            TelemetryClient(address, key, on_frame=lambda frame: self.did())
            for _ in range(self.count)
        ]
        for screen in self._screens:
            screen.start()
        self.gather(self.crowd)

    def gather(self, crowd: int) -> None:
        """Connect so many viewers that read nothing and acknowledge nothing."""
        assert self._telemetry is not None, "the screens are off"
        self.crowd = crowd
        while len(self._silent) < crowd:
            self._silent.append(_silent(self._telemetry))

    def stop(self) -> None:
        """Close every connection; a crowd that was sent away does not come back."""
        super().stop()
        for screen in self._screens:
            screen.close()
        for viewer in self._silent:
            with contextlib.suppress(OSError):
                viewer.close()
        self._screens, self._silent, self.crowd = [], [], 0


def _silent(telemetry: Telemetry) -> socket.socket:
    """Connect a viewer that proves the key and then says nothing more."""
    connection = socket.create_connection(telemetry.address, timeout=5.0)
    splitter, found = Splitter(_MOST_BYTES), list[Message]()
    while not found:
        found += splitter.feed(connection.recv(1 << 16))
    nonce: Any = found[0].meta["nonce"]
    hello = {"proof": proof(telemetry.key, "viewer", nonce), "nonce": secrets.token_hex(16)}
    connection.sendall(encode(Message(Kind.HELLO, meta=hello)))
    return connection
