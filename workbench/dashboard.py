"""The dashboard as a child: started by command beside an engine, told of once its page answers."""

from __future__ import annotations

import contextlib
import importlib.util
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator

from engine.errors import MachineError
from engine.runtime.telemetry import Telemetry
from workbench import paths
from workbench.lifecycle import Child, own_identity, python_command

READY_S = 60.0
"""How long the dashboard may take to answer."""
ENDING_S = 0.4
"""How long a page is given to say that the end has come."""
_NEEDED = ("panel", "bokeh", "psutil")


def require_packages() -> None:
    """Refuse to start without the packages of the extra `ui`.

    Raises:
        MachineError: one is missing.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise MachineError(
            f"the dashboard needs {', '.join(missing)}; install the extra with "
            "`pip install -e '.[ui]'`."
        )


@contextlib.contextmanager
def dashboard_process(telemetry: Telemetry, port: int) -> Iterator[Child]:
    """Start the dashboard's process; end it however the block ends.

    Args:
        telemetry: what it follows.
        port: first port to try; the next free one is taken.
    """
    host, stream_port = telemetry.address
    command = python_command(
        "dashboards",
        f"--address={host}:{stream_port}",
        "--key-file=-",
        f"--port={port}",
        f"--parent={own_identity()}",
    )
    child = Child("dashboard", command, first_line=telemetry.key.hex(), folder=paths.root())
    try:
        yield child
    finally:
        child.stop()


def tell_end(telemetry: Telemetry) -> None:
    """Let every page say that the engine is ending, before anything ends."""
    telemetry.note(ending=True)
    time.sleep(ENDING_S)


def when_it_answers(child: Child, then: Callable[[str], None], page: str = "") -> None:
    """Call `then` with the address of `page` once that answers; on a thread, returns at once.

    A child that ends or stays silent is never told of; whoever started it looks at it.
    """

    def wait() -> None:
        with contextlib.suppress(MachineError, OSError):
            url = f"{child.report(READY_S)['url']}{page}"
            with urllib.request.urlopen(url, timeout=READY_S) as answer:
                answer.read()
            then(url)

    threading.Thread(target=wait, name="announce", daemon=True).start()
