"""A Panel page with both widgets, served by this process, for a browser to look at."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import panel as pn
from panel.io.server import get_server
from tornado.ioloop import IOLoop

GROUNDS = {"light": "#f6f6f3", "dark": "#0e1113"}


SETTLED_MS = 700
"""How long after it is drawn a page goes on telling the server about itself (size, dark mode, time
zone). A change that Panel 1.9 is given in between may reach the browser only with the next one."""


class Shown:
    """The page: its address, and the widgets of the session opened last."""

    def __init__(self) -> None:
        self.url = ""
        self.widgets: list[Any] = []
        self.document: Any = None

    def call(self, change: Callable[[], object]) -> None:
        """Run `change` where the page's document may be changed, and wait for it."""
        done = threading.Event()

        def run() -> None:
            try:
                change()
            finally:
                done.set()

        self.document.add_next_tick_callback(run)
        assert done.wait(10), "the page's server does not answer"


@contextmanager
def served(make: Callable[[], list[Any]]) -> Iterator[Shown]:
    """Serve the widgets that `make` returns, one under the other, anew for each session."""
    shown, started, loops = Shown(), threading.Event(), []

    def page() -> pn.Column:
        theme = pn.state.session_args.get("theme", [b"light"])[0].decode()
        shown.widgets, shown.document = make(), pn.state.curdoc
        looks = {"background": GROUNDS[theme], "padding": "20px", "gap": "16px"}
        return pn.Column(*shown.widgets, styles=looks, width=1000)

    def run() -> None:
        loop = IOLoop()
        loops.append(loop)
        server = get_server({"/": page}, port=0, address="127.0.0.1", location=False)
        server.start()
        shown.url = f"http://127.0.0.1:{server.port}/"
        loop.add_callback(started.set)
        loop.start()
        server.stop()
        loop.close(all_fds=True)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert started.wait(30)
        yield shown
    finally:
        loops[0].add_callback(loops[0].stop)
        thread.join(10)


def pixel(canvas: Any, row: int, column: int, shape: tuple[int, int]) -> list[int]:
    """Return [r, g, b] in the middle of a cell, as the canvas has it."""
    return canvas.evaluate(
        """(canvas, [r, c, rows, columns]) => {
            const ratio = devicePixelRatio;
            const box = canvas.closest(".trw-map");
            const left = Number(box.dataset.left), width = canvas.clientWidth - left;
            const height = canvas.clientHeight - 22;
            const x = Math.round((left + (c + 0.5) * width / columns) * ratio);
            const y = Math.round((r + 0.5) * height / rows * ratio);
            const copy = document.createElement("canvas");
            const pen = copy.getContext("2d", { willReadFrequently: true });
            pen.drawImage(canvas, x, y, 1, 1, 0, 0, 1, 1);
            return [...pen.getImageData(0, 0, 1, 1).data.slice(0, 3)];
        }""",
        [row, column, *shape],
    )


def brightness(rgb: list[int]) -> float:
    return float(np.dot(rgb, [0.2126, 0.7152, 0.0722]) / 255)
