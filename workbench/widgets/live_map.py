"""The live map for two hosts: an anywidget for notebooks, a component for Panel pages.

    shown = map_widget(load_spec(start.moe_layers))       # in a notebook's cell
    shown = map_pane(load_spec(start.moe_layers))         # on a Panel page
    shown.draw(fair_shares(counts_LE))                    # as often as you like

Both have the same properties and the same `draw`; the browser's side is one module.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy.typing as npt

from workbench.widgets.frames import MapFeed, MapSpec
from workbench.widgets.hosts import Hosted, Prop, notebook_class, panel_class

PROPS = {
    "frame": Prop(b"", "The newest frame sent; layout in frames.py."),
    "spec": Prop("", "Words and scale, as MapSpec.to_json() writes them."),
    "ack": Prop(0, "The highest seq the browser has drawn."),
    "row": Prop(-1, "Row of the cell in focus, -1 for none."),
    "column": Prop(-1, "Column of the cell in focus, -1 for none."),
    "view": Prop("map", "How it is drawn.", ("map", "table")),
    "theme": Prop("auto", "Colours; auto asks the page.", ("auto", "light", "dark")),
}


def map_widget(spec: MapSpec, **traits: Any) -> Any:
    """Return a live map for a notebook: an anywidget with `draw(values_RC)` and `PROPS`.

    Raises:
        ImportError: anywidget is not installed; `pip install 'tokenrouter-workbench[ui]'`.
    """
    return in_notebook()(spec, **traits)


def map_pane(spec: MapSpec, **params: Any) -> Any:
    """Return a live map for a Panel page: a component with `draw(values_RC)` and `PROPS`.

    Call `draw` where the page's document may be changed (a periodic callback, a handler).

    Raises:
        ImportError: panel is not installed; `pip install 'tokenrouter-workbench[ui]'`.
    """
    return on_page()(spec, **params)


class LiveMap(Hosted):
    """A map of rows x columns that follows a running engine."""

    frame: bytes

    def __init__(self, spec: MapSpec, **props: Any) -> None:
        """Make an empty map with these words and this scale."""
        super().__init__(spec=spec.to_json(), **props)  # type: ignore[call-arg]
        self.scale = spec.low, spec.high
        self.feed = MapFeed(lambda frame: setattr(self, "frame", frame))
        self.listen("ack", self.feed.on_ack)

    def draw(self, values_RC: npt.ArrayLike, *, time_s: float | None = None) -> None:
        """Draw values next; NaN is no data. Skipped when newer ones come before it is time."""
        low, high = self.scale
        self.feed.offer(values_RC, low=low, high=high, time_s=time_s)


@cache
def in_notebook() -> Any:
    """Return the anywidget's class."""
    return notebook_class(LiveMap, "live_map", PROPS)


@cache
def on_page() -> Any:
    """Return the Panel component's class."""
    return panel_class(LiveMap, "live_map", PROPS)
