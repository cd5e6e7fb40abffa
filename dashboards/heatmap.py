"""The layer x expert map: a Bokeh image with one fixed colour scale, and words in its cells.

Built once; an update replaces two data sources. Zero is drawn next to the background, so that an
idle map does not look hot, and small maps write each load into its cell, so that colour is never
the only signal.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from bokeh.core.properties import value
from bokeh.models import (
    ColumnDataSource,
    CustomJSHover,
    FixedTicker,
    HoverTool,
    LinearColorMapper,
    Span,
)
from bokeh.plotting import figure

from dashboards import theme as themes
from dashboards.readings import Load, load_word

MAX_WORDS = 256
"""Maps with more cells than this are drawn without words."""
MAX_LINES = 24
"""More columns than this are drawn without gaps between the cells."""
_FONT = "Inter, system-ui, sans-serif"
_TOOLTIP = f"""
<div style="font: 13px/1.5 {_FONT}; color: #17191c; font-variant-numeric: tabular-nums">
  <b>$y{{custom}}, expert $x{{custom}}</b><br>@image{{0.00}} × its fair share
</div>"""


class Heatmap:
    """A figure of L x E cells and the sources that feed it."""

    def __init__(self, layers: Sequence[str], experts: int, theme: str) -> None:
        self.shape = (len(layers), experts)
        self._palette = themes.load_palette(theme)
        self._worded = len(layers) * experts <= MAX_WORDS
        rows, columns = np.mgrid[0 : len(layers), 0:experts]
        self._at = {"x": columns.ravel(), "y": rows.ravel()}
        self.cells = ColumnDataSource({"image": [np.zeros(self.shape, np.float32)]})
        self.words = ColumnDataSource(self._words(np.zeros(self.shape, np.float32)))
        self.figure = _figure(layers, experts, theme)
        self._draw(layers, theme)

    def show(self, load: Load | None) -> None:
        """Draw the next load."""
        share_LE = load.share_LE if load else np.zeros(self.shape, np.float32)
        self.cells.data = {"image": [share_LE]}
        if self._worded:
            self.words.data = self._words(share_LE)

    def _draw(self, layers: Sequence[str], theme: str) -> None:
        depth, experts = self.shape
        mapper = LinearColorMapper(palette=self._palette, low=0.0, high=themes.LOAD_TOP)
        image = self.figure.image(
            "image",
            source=self.cells,
            x=-0.5,
            y=-0.5,
            dw=experts,
            dh=depth,
            color_mapper=mapper,
        )
        name = CustomJSHover(
            args={"names": list(layers)},
            code="return names[Math.max(0, Math.min(names.length - 1, Math.round(value)))]",
        )
        whole = CustomJSHover(code="return String(Math.max(0, Math.round(value)))")
        self.figure.add_tools(
            HoverTool(
                renderers=[image],
                tooltips=_TOOLTIP,
                formatters={"$y": name, "$x": whole},
                point_policy="follow_mouse",
            )
        )
        gap = themes.COLOURS[theme]["surface"]
        if experts <= MAX_LINES:
            for at in range(1, experts):
                self.figure.add_layout(_gap("height", at - 0.5, gap))
        for at in range(1, depth):
            self.figure.add_layout(_gap("width", at - 0.5, gap))
        if self._worded:
            self.figure.text(
                x="x",
                y="y",
                text="text",
                text_color="ink",
                source=self.words,
                text_align="center",
                text_baseline="middle",
                text_font=value(_FONT),
                text_font_size="13px",
                level="overlay",
            )

    def _words(self, share_LE: np.ndarray) -> dict[str, object]:
        shares = share_LE.ravel().tolist()
        last = len(self._palette) - 1
        at = [min(last, round(last * share / themes.LOAD_TOP)) for share in shares]
        return {
            **self._at,
            "text": [load_word(share) for share in shares],
            "ink": [themes.ink_on(self._palette[n]) for n in at],
        }


def _gap(dimension: str, location: float, colour: str) -> Span:
    return Span(
        dimension=dimension,  # type: ignore[arg-type]
        location=location,
        line_color=colour,
        line_width=3,
        level="annotation",
    )


def _figure(layers: Sequence[str], experts: int, theme: str) -> figure:
    colours = themes.COLOURS[theme]
    plot = figure(
        sizing_mode="stretch_both",
        toolbar_location=None,
        tools="",
        x_range=(-0.5, experts - 0.5),
        y_range=(len(layers) - 0.5, -0.5),
        min_border=0,
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        output_backend="canvas",
    )
    plot.grid.visible = False
    every = max(1, experts // 16)
    plot.xaxis.ticker = FixedTicker(ticks=list(range(0, experts, every)))
    plot.xaxis.axis_label = "expert"
    deep = max(1, len(layers) // 12)
    plot.yaxis.ticker = FixedTicker(ticks=list(range(0, len(layers), deep)))
    plot.yaxis.major_label_overrides = {at: name for at, name in enumerate(layers)}
    for axis in plot.axis:
        axis.axis_line_color = None
        axis.major_tick_line_color = None
        axis.minor_tick_line_color = None
        axis.major_label_text_color = axis.axis_label_text_color = colours["muted"]
        axis.major_label_text_font = axis.axis_label_text_font = _FONT
        axis.major_label_text_font_size = axis.axis_label_text_font_size = "12px"
        axis.axis_label_text_font_style = "normal"
        axis.major_label_standoff = 8
        axis.axis_label_standoff = 4
    return plot
