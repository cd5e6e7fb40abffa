"""How many pages of this dashboard are open in a browser.

The engine counts connections to its telemetry, and the whole dashboard is one of these, however
many look at it.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

_servers: WeakSet[Any] = WeakSet()


def serve(server: Any) -> None:
    """Count the pages of a Bokeh server from now on."""
    _servers.add(server)


def open_pages() -> int:
    """Return how many pages a browser is connected to now."""
    return sum(
        session.connection_count > 0 for server in _servers for session in server.get_sessions()
    )
