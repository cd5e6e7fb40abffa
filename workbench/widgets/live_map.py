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
from workbench.widgets.module import script, styles


def map_widget(spec: MapSpec, **traits: Any) -> Any:
    """Return a live map for a notebook: an anywidget with `draw(values_RC)`.

    `row` and `column` are the cell in focus (-1 for none), `ack` the highest seq drawn, `view` is
    `map` or `table`, `theme` is `auto`, `light` or `dark`.
    """
    return anywidget_class()(spec, **traits)


def map_pane(spec: MapSpec, **params: Any) -> Any:
    """Return a live map for a Panel page: a component with `draw(values_RC)`.

    Properties as in `map_widget`; call `draw` where the page's document may be changed (a periodic
    callback, a handler).
    """
    return panel_class()(spec, **params)


@cache
def anywidget_class() -> Any:
    """Return the anywidget's class; needs anywidget.

    Raises:
        ImportError: anywidget is not installed; `pip install 'tokenrouter-workbench[ui]'`.
    """
    import anywidget
    import traitlets

    class LiveMap(anywidget.AnyWidget):
        """A map of rows x columns that follows a running engine."""

        _esm = script("live_map")
        _css = styles("live_map")

        frame = traitlets.Bytes(b"").tag(sync=True)
        spec = traitlets.Unicode("").tag(sync=True)
        ack = traitlets.Int(0).tag(sync=True)
        row = traitlets.Int(-1).tag(sync=True)
        column = traitlets.Int(-1).tag(sync=True)
        view = traitlets.Enum(["map", "table"], "map").tag(sync=True)
        theme = traitlets.Enum(["auto", "light", "dark"], "auto").tag(sync=True)

        def __init__(self, spec: MapSpec, **traits: Any) -> None:
            super().__init__(spec=spec.to_json(), **traits)
            self.scale = spec.low, spec.high
            self.feed = MapFeed(lambda frame: setattr(self, "frame", frame))
            self.observe(lambda change: self.feed.on_ack(change["new"]), "ack")

        def draw(self, values_RC: npt.ArrayLike, *, time_s: float | None = None) -> None:
            """Draw values next; NaN is no data. Skipped when newer ones come before it is time."""
            low, high = self.scale
            self.feed.offer(values_RC, low=low, high=high, time_s=time_s)

    return LiveMap


@cache
def panel_class() -> Any:
    """Return the Panel component's class; needs panel.

    Raises:
        ImportError: panel is not installed; `pip install 'tokenrouter-workbench[ui]'`.
    """
    import param
    from panel.custom import AnyWidgetComponent

    class LiveMap(AnyWidgetComponent):
        """A map of rows x columns that follows a running engine."""

        _esm = script("live_map")
        _stylesheets = [styles("live_map")]

        frame = param.Bytes(default=b"", doc="The newest frame sent; layout in frames.py.")
        spec = param.String(default="", doc="Words and scale, as MapSpec.to_json() writes them.")
        ack = param.Integer(default=0, doc="The highest seq the browser has drawn.")
        row = param.Integer(default=-1, doc="Row of the cell in focus, -1 for none.")
        column = param.Integer(default=-1, doc="Column of the cell in focus, -1 for none.")
        view: Any = param.Selector(default="map", objects=["map", "table"], doc="How it is drawn.")
        theme: Any = param.Selector(
            default="auto", objects=["auto", "light", "dark"], doc="Colours; auto asks the page."
        )

        def __init__(self, spec: MapSpec, **params: Any) -> None:
            super().__init__(  # type: ignore[no-untyped-call]
                spec=spec.to_json(), **{"sizing_mode": "stretch_width", "margin": 0, **params}
            )
            self.scale = spec.low, spec.high
            self.feed = MapFeed(lambda frame: setattr(self, "frame", frame))
            self.param.watch(lambda change: self.feed.on_ack(change.new), "ack")

        def draw(self, values_RC: npt.ArrayLike, *, time_s: float | None = None) -> None:
            """Draw values next; NaN is no data. Skipped when newer ones come before it is time."""
            low, high = self.scale
            self.feed.offer(values_RC, low=low, high=high, time_s=time_s)

    return LiveMap
