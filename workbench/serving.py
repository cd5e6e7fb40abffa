"""Run a service until somebody asks it to end: what stands behind `workbench serve`."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import ConfigError, MachineError
from workbench.lifecycle import Ended, ending_signals, signals_held

if TYPE_CHECKING:
    from engine.serve.config import ServeConfig
    from engine.serve.startup import Server

NEEDED = (
    *("fastapi", "grpc", "grpc_health", "grpc_reflection", "httpx", "jinja2"),
    *("prometheus_client", "uvicorn", "websockets"),
)


def require_packages() -> None:
    """Check that the extra `serve` is there.

    Raises:
        MachineError: a package is missing.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise MachineError(
            f"{', '.join(missing)} is missing; install the extra with `pip install -e '.[serve]'`."
        )


def make_key(file: Path | None, name: str, scopes: Sequence[str], *, as_json: bool) -> None:
    """Add a key to a token file and print it, which happens once.

    Raises:
        ConfigError: no file is named, or the name or a scope cannot be had.
    """
    from engine.serve.auth import add_key

    if file is None:
        raise ConfigError("add_key needs the file to add it to: --token-file FILE.")
    key = add_key(file, name, scopes)
    if as_json:
        print(json.dumps({"key": key, "name": name, "scopes": sorted(set(scopes))}))
    else:
        print(key)
        _note(f"kept as a hash in {file}; this is the only time the key is shown")


def run(config: ServeConfig, *, as_json: bool) -> int:
    """Serve until a signal comes, drain, and return the exit code.

    Raises:
        StartError: a stage of the start failed.
        MachineError: the service ended by itself.
    """
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        with ending_signals():
            with signals_held():
                from engine.serve.startup import started
            with started(config, _note) as server:
                _announce(server, as_json)
                try:
                    _wait(server)
                except Ended as ended:
                    _drain(server, ended)
    except Ended:
        with suppress(Ended):
            _note("ended while it was starting")
    return 0


def _announce(server: Server, as_json: bool) -> None:
    service = server.service
    report = {
        "url": server.url,
        "grpc": server.grpc_address,
        "pid": os.getpid(),
        "model": service.config.model_name,
    }
    if as_json:
        print(json.dumps(report), flush=True)
    else:
        also = f", gRPC at {server.grpc_address}" if server.grpc_address else ""
        print(f"\n  {report['model']} is served at {server.url}/v1{also}; Ctrl-C drains it.\n")
        sys.stdout.flush()


def _wait(server: Server) -> None:
    """Stay until a signal raises `Ended`.

    Raises:
        MachineError: the engine or the HTTP server has ended by itself.
    """
    nothing = threading.Event()
    while not nothing.wait(0.5):
        if server.service.loop.error is not None:
            raise MachineError(f"the engine has stopped: {server.service.loop.error}.")
        if not server.listener.alive:
            raise MachineError("the HTTP server has ended by itself; the log says more.")


def _drain(server: Server, ended: Ended) -> None:
    left = server.service.loop.books.running
    _note(f"{ended.name}: draining, {left} requests under way")
    began = time.monotonic()
    if server.drain():
        _note(f"drained in {time.monotonic() - began:.1f} s")
    else:
        _note(f"{server.service.loop.books.running} requests did not end in time; given up")


def _note(words: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {words}", file=sys.stderr, flush=True)
