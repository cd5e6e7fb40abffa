"""Who runs where: the watched engine alone on its core, everybody who looks on the others."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workbench import paths
from workbench.lifecycle import Child, own_identity, python_command

READY_S = 60.0
_PORT = 5300
_ANSWER_S = 30.0


class WatchedEngine(Child):
    """The engine's process, which answers questions about itself."""

    def __init__(self, *, model: Path | None, shape: tuple[int, int, int], core: int | None):
        """Start it, invented with this shape (layers, experts, top-k) unless there is a model."""
        self.key = secrets.token_bytes(32)
        be = {
            "key": self.key.hex(),
            "core": core,
            "parent": own_identity(),
            "model": str(model.resolve()) if model else None,
            "running": 8,
            "shape": shape,
        }
        command = python_command("workbench.bench.dashboard.process")
        super().__init__("engine", command, first_line=json.dumps(be), folder=paths.root())
        host, port = self.report(READY_S)["address"]
        self.address = str(host), int(port)

    def ask(self, do: str, *, wait_s: float = _ANSWER_S, **detail: Any) -> dict[str, Any]:
        """Ask one question.

        Raises:
            MachineError: the process has ended or does not answer.
        """
        with contextlib.suppress(OSError):
            self._stdin.write(json.dumps({"do": do, **detail}) + "\n")
            self._stdin.flush()
        return self.report(wait_s)

    def measure(self, seconds: float) -> dict[str, Any]:
        """Measure the steps of so long."""
        return self.ask("measure", seconds=seconds, wait_s=seconds + _ANSWER_S)

    def turns(self, seconds: float, turn_s: float) -> dict[str, Any]:
        """Measure the steps of so long with the stream shut and open in turn."""
        return self.ask("turns", seconds=seconds, turn_s=turn_s, wait_s=seconds + _ANSWER_S)


@contextlib.contextmanager
def watched_engine(
    model: Path | None = None, *, shape: tuple[int, int, int] = (4, 8, 2)
) -> Iterator[WatchedEngine]:
    """Run the watched engine on the first core; everything started after it gets the others.

    Where there is one core only, or the system cannot pin, all share what there is.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    pinned = len(cores) > 1
    engine = WatchedEngine(model=model, shape=shape, core=cores[0] if pinned else None)
    try:
        if pinned:
            # Of this thread, and so of all threads and processes that it starts from now on.
            os.sched_setaffinity(0, cores[1:])
        yield engine
    finally:
        if pinned:
            os.sched_setaffinity(0, cores)
        engine.stop()


@contextlib.contextmanager
def dashboard(engine: WatchedEngine) -> Iterator[str]:
    """Run a dashboard that follows the engine; gives its address."""
    host, port = engine.address
    command = python_command(
        "dashboards",
        f"--address={host}:{port}",
        "--key-file=-",
        f"--port={_PORT}",
        f"--parent={own_identity()}",
    )
    child = Child("dashboard", command, first_line=engine.key.hex(), folder=paths.root())
    try:
        yield str(child.report(READY_S)["url"])
    finally:
        child.stop()


def pinning() -> str:
    """Say who runs where."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        return "not pinned: one core, or no way to pin"
    others = ", ".join(map(str, cores[1:]))
    return f"engine on core {cores[0]}; dashboard, browsers and clients on {others}"
