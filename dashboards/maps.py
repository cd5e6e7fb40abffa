"""The live map as a part of a page: without a frame and a head of its own, as high as its place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy.typing as npt

from workbench.widgets import MapSpec, map_pane

AROUND = 66
"""CSS pixels that colour bar and value line take of the place."""
MIN_HEIGHT = 120
_BARE = """
.trw { border: 0; border-radius: 0; padding: 0; background: none; }
.trw-head { display: none; }
.trw-legend { margin: 8px 0 8px; }
.trw-table { position: absolute; inset: 46px 0 28px; max-height: none; }
.trw-map { height: 100%; container-type: inline-size; --fills-its-place: 1; }
.trw-map { display: flex; flex-direction: column; }
.trw-picture { flex: 1; min-height: 0; }
.trw-legend, .trw-foot { flex-wrap: nowrap; }
.trw-scale { min-width: 0; }
.trw-foot span { white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }
@container (max-width: 540px) {
  .trw-stamp, .trw-swatch, .trw-swatch + span { display: none; }
}
@container (max-width: 400px) { .trw-axes { display: none; } }
.trw-table:not([hidden]) + .trw-foot { position: absolute; bottom: 0; left: 0; right: 0; }
"""


class PageMap:
    """A live map, and the words it has now."""

    def __init__(self, theme: str, view: str = "map", spec: MapSpec | None = None) -> None:
        self.spec = spec or MapSpec(title="", height=260)
        self.pane: Any = map_pane(
            self.spec, theme=theme, view=view, sizing_mode="stretch_both", stylesheets=[_BARE]
        )

    def draw(self, values_RC: npt.ArrayLike, *, time_s: float | None = None) -> None:
        """Draw these values next."""
        self.pane.draw(values_RC, time_s=time_s)

    def fit(self, height: int) -> None:
        """Fill a place so many CSS pixels high."""
        self._tell(replace(self.spec, height=max(MIN_HEIGHT, height - AROUND)))

    def say(self, spec: MapSpec) -> None:
        """Change words or scale; the height stays."""
        spec = replace(spec, height=self.spec.height)
        self._tell(spec)

    def _tell(self, spec: MapSpec) -> None:
        if spec != self.spec:
            self.spec = spec
            self.pane.scale = spec.low, spec.high
            self.pane.spec = spec.to_json()
