"""The dashboard's server: one table of pages, served on loopback without any outside request.

The page's policy forbids the browser to load anything from elsewhere, and the websocket accepts
only pages of this very server.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

import panel as pn
from panel.io.server import get_server
from tornado.web import RedirectHandler, RequestHandler

from dashboards import audience
from dashboards.page import Page
from dashboards.pages import demo, drills, experts, now, step
from dashboards.source import Source
from engine.errors import MachineError
from workbench import theme as themes

Build = Callable[[Source, str, Mapping[str, str], Mapping[str, Any]], Page]
"""Takes source, theme, the address's arguments and what frames the page; called per session."""

PORT_TRIES = 20


class Route(NamedTuple):
    """One page of the dashboard."""

    path: str
    title: str
    build: Build


ROUTES = (
    Route("/", "Now", now.build),
    Route("/experts", "Experts", experts.build),
    Route("/step", "Step", step.build),
    Route("/drills", "Drills", drills.build),
    Route("/demo", "Demo", demo.build),
)
"""Path -> page. The order is that of the links on top of every page."""

_COLOURS = " ".join(
    f"{root} {{ {themes.css_variables(theme)} }}"
    for root, theme in zip((":root", ':root[data-theme="dark"]'), themes.THEMES, strict=True)
)
"""Both themes' colours, so that a page can change from one to the other without loading anew."""
_TEMPLATE = (Path(__file__).parent / "template.html").read_text(encoding="utf-8")


class Alive(RequestHandler):
    """Says that the server answers; pages ask when their connection is lost."""

    def get(self) -> None:
        """Answer 200 with nothing to cache."""
        self.set_header("Cache-Control", "no-store")
        self.write("alive")


def make_server(source: Source, port: int) -> Any:
    """Return a Bokeh server that listens on the first free port from `port`, not started.

    Raises:
        MachineError: none of the `PORT_TRIES` ports from `port` is free.
    """
    pages = {route.path: _page(route, source) for route in ROUTES}
    for candidate in filter(_is_free, range(port, min(port + PORT_TRIES, 65536))):
        try:
            server = get_server(
                pages,
                port=candidate,
                address="127.0.0.1",
                websocket_origin=[f"127.0.0.1:{candidate}", f"localhost:{candidate}"],
                title={route.path: f"{route.title} · TokenRouter Workbench" for route in ROUTES},
                extra_patterns=[
                    (r"/alive", Alive),
                    (r"/now", RedirectHandler, {"url": "./", "permanent": False}),
                ],
                location=False,
                check_unused_sessions_milliseconds=5000,
                unused_session_lifetime_milliseconds=15000,
            )
            audience.serve(server)
            return server
        except OSError as fault:  # somebody was quicker
            if fault.errno != errno.EADDRINUSE:
                raise
    raise MachineError(
        f"no free port between {port} and {port + PORT_TRIES - 1}; choose another with --port."
    )


def _is_free(port: int) -> bool:
    """Say whether nobody listens on `port`; the server itself leaks a socket when it fails to."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _page(route: Route, source: Source) -> Callable[[], pn.Template]:
    """Return what Bokeh calls for each session of `route`."""

    def session() -> pn.Template:
        chosen = arguments()
        theme = chosen.get("theme", "")
        theme = theme if theme in themes.THEMES else themes.THEMES[0]
        page = route.build(source, theme, chosen, frame_of(chosen, theme))
        template = pn.Template(_TEMPLATE)
        template.add_panel("page", page)
        template.add_variable("theme", theme)
        template.add_variable("variables", _COLOURS)
        template.add_variable("themed", "theme" in chosen)
        return template

    return session


def arguments() -> dict[str, str]:
    """Return the arguments in the address of the page, the last of each name."""
    given: Mapping[str, list[bytes]] = pn.state.session_args
    return {name: values[-1].decode("utf-8", "replace")[:64] for name, values in given.items()}


def frame_of(chosen: Mapping[str, str], theme: str) -> dict[str, Any]:
    """Return what surrounds every page: links to the pages, and to this one in the other theme."""
    other = themes.THEMES[1 - themes.THEMES.index(theme)]
    # A presenter who looks at another page comes back as the presenter.
    kept = urlencode({"theme": theme} | {name: chosen[name] for name in ("key",) if name in chosen})
    return {
        "routes": [{"title": route.title, "href": f".{route.path}?{kept}"} for route in ROUTES],
        "other_theme": {
            "name": other,
            "word": other.capitalize(),
            "href": f"?theme={other}",
        },
    }
