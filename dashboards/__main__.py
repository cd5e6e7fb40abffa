"""The dashboard as a program: `python -m dashboards --address HOST:PORT --key-file FILE`.

With `--replay FILE` it shows a recorded trace instead of a running engine.

The key never stands on the command line: it is the first line of a file, or of standard input with
`--key-file -`. Once the server listens, one JSON line with its address goes to standard output.
With `--parent` the program ends when that process does.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import ConfigError, WorkbenchError
from workbench.lifecycle import end_with_parent

if TYPE_CHECKING:
    from dashboards.source import Source


def main(arguments: list[str] | None = None) -> int:
    """Serve until ended; return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        make = _source(options)
        if options.parent:
            end_with_parent(options.parent, options.key_file == "-")
        return _serve(make, options.port)
    except WorkbenchError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _source(options: argparse.Namespace) -> Callable[[], Source]:
    """Return what makes the source that the options name; what is wrong is refused now."""
    if (options.replay is None) == (options.address is None):
        raise ConfigError("name one source: an engine's --address, or a file to --replay.")
    if options.replay is not None:
        from dashboards.replay import ReplaySource

        return lambda: ReplaySource(options.replay, speed=options.speed)
    if options.key_file is None:
        raise ConfigError("--address needs --key-file, the engine's key.")
    address, key = _address(options.address), _key(options.key_file)

    def live() -> Source:
        from dashboards.source import LiveSource

        return LiveSource(address, key)

    return live


def _serve(make: Callable[[], Source], port: int) -> int:
    from dashboards.app import make_server
    from dashboards.pages import drills

    source = make()
    server = make_server(source, port)
    # Panel installs a handler of its own for SIGINT; SIGTERM ends as quietly.
    signal.signal(signal.SIGTERM, lambda *_: server.io_loop.add_callback_from_signal(_stop, server))
    signal.signal(signal.SIGINT, lambda *_: server.io_loop.add_callback_from_signal(_stop, server))
    server.start()
    print(json.dumps({"url": f"http://127.0.0.1:{server.port}/"}), flush=True)
    server.io_loop.start()
    drills.ROOM.close()
    source.close()
    return 0


def _stop(server: object) -> None:
    server.io_loop.stop()  # type: ignore[attr-defined]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dashboards", description=__doc__)
    parser.add_argument("--address", help="HOST:PORT of the engine's telemetry")
    parser.add_argument("--key-file", help="file with the key in hex; - reads stdin")
    parser.add_argument("--replay", metavar="FILE", help="play this .moetrace file instead")
    parser.add_argument("--speed", type=float, default=1.0, help="of the replay (1)")
    parser.add_argument("--port", type=int, default=5006, help="first port to try (5006)")
    parser.add_argument("--parent", help="PID:CREATE_TIME of the process to end with")
    return parser


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"address ({text}) must be HOST:PORT.")
    return host, int(port)


def _key(name: str) -> bytes:
    """Read the key; of standard input only the first line, so that its end can be watched."""
    try:
        line = sys.stdin.readline() if name == "-" else Path(name).read_text("ascii").split("\n")[0]
        return bytes.fromhex(line)
    except (OSError, ValueError):
        raise ConfigError(
            f"key-file ({name}) must hold the key in hex on its first line."
        ) from None


if __name__ == "__main__":
    sys.exit(main())
