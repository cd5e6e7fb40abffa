"""What all figures share: the sheet with its title and label, panels, numbers as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from textwrap import wrap
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench import theme as themes
from workbench.figures.template import template

Line = dict[str, Any]
"""One line of a table, values by column."""

MAX_PANELS = 6
"""More layers than this are thinned to as many, evenly spaced, unless the caller names them."""
MAX_WORDS = 600
"""Maps with more cells than this are drawn without a number in each."""

PANEL_HEIGHT = 250
HEAD = 126
LINE, TITLE_LINE = 18, 27
"""Pixels of one more line in the head, and in the title."""
MAX_LINE, MAX_TITLE = 108, 66
"""Characters of a line; more would run out of a figure 900 pixels wide."""
FOOT = 64


def sheet(
    title: str,
    subtitle: str,
    frame: pd.DataFrame,
    theme: str,
    *,
    height: int = 460,
    head: int = HEAD,
    note: str = "",
    rows: int = 1,
    cols: int = 1,
    label: str | None = None,
    **subplots: Any,
) -> go.Figure:
    """Return a figure of rows x cols panels with nothing in them yet.

    Args:
        title: what is drawn, over what, in which unit.
        subtitle: the finding, in numbers.
        frame: the view's table; its `label` is shown, and that it is empty if it is.
        theme: light or dark.
        height: pixels; the width is the reader's.
        head: pixels above the panels.
        note: how the numbers are computed; stands behind the label.
        rows: panels below each other.
        cols: panels side by side.
        label: words for the label in place of the table's.
        subplots: passed to plotly's `make_subplots`.

    Raises:
        ConfigError: a theme there is none of.
    """
    own = themes.colours(theme)
    badge = label if label is not None else label_words(frame)
    below = wrap(" · ".join(part for part in (badge, note) if part), MAX_LINE)
    lines = wrap(title, MAX_TITLE)
    figure = make_subplots(rows=rows, cols=cols, **subplots)
    figure.update_annotations(
        font={"size": 14, "color": own["text"]}, xanchor="left", yanchor="bottom"
    )
    figure.update_layout(
        template=template(theme),
        height=height,
        margin={"t": head + (len(below) - 1) * LINE + (len(lines) - 1) * TITLE_LINE},
        title={"text": "<br>".join(lines), "subtitle": {"text": "<br>".join([subtitle, *below])}},
    )
    if frame.empty:
        figure.update_xaxes(visible=False)
        figure.update_yaxes(visible=False)
        figure.add_annotation(
            text="Nothing to draw: the trace holds none of this.",
            name="empty",
            x=0.5,
            y=0.5,
            xref="paper",
            yref="paper",
            showarrow=False,
            font={"color": own["muted"], "size": 16},
        )
    return figure


def panels(
    title: str,
    subtitle: str,
    frame: pd.DataFrame,
    theme: str,
    names: Sequence[str],
    *,
    cols: int = 2,
    panel_height: int = PANEL_HEIGHT,
    gap: int = 72,
    head: int = HEAD + 20,
    foot: int = FOOT,
    **options: Any,
) -> tuple[go.Figure, list[tuple[int, int]]]:
    """Return a sheet of one panel for each name, and each panel's (row, col), from 1."""
    cols = max(1, min(cols, len(names)))
    rows = max(1, math.ceil(len(names) / cols))
    inner = rows * panel_height + (rows - 1) * gap
    figure = sheet(
        title,
        subtitle,
        frame,
        theme,
        rows=rows,
        cols=cols,
        height=head + inner + foot,
        head=head,
        subplot_titles=list(names),
        vertical_spacing=gap / inner if rows > 1 else 0,
        **options,
    )
    figure.update_layout(margin={"b": foot})
    for at, note in enumerate(figure.layout.annotations[: len(names)]):
        axis = figure.get_subplot(at // cols + 1, at % cols + 1).xaxis
        note.update(x=axis.domain[0], yshift=4)
    return figure, [(at // cols + 1, at % cols + 1) for at in range(len(names))]


def heat(
    values_YX: Any,
    *,
    theme: str,
    words_YX: Any,
    hover_YX: Any = None,
    numbers_YXC: Any = None,
    hovertemplate: str = "%{hovertext}<extra></extra>",
    top: float,
    colorbar: dict[str, Any] | None = None,
) -> go.Heatmap:
    """Return a map of cells from 0 to `top`; NaN cells are left blank.

    Args:
        values_YX: (rows, columns) numbers; drawn at whole coordinates from 0.
        theme: light or dark.
        words_YX: the text of each cell, left out of large maps; None writes none.
        hover_YX: the text shown when a cell is pointed at; or None, and
        numbers_YXC: C numbers for each cell, for large maps, and
        hovertemplate: plotly's template, in which they are `customdata[c]`.
        top: value of the last colour; larger ones are drawn the same.
        colorbar: plotly's; None draws none.
    """
    values = np.asarray(values_YX, np.float64)
    small = values.size <= MAX_WORDS
    gap = 2 if small else 1 if max(values.shape) <= 64 else 0
    return go.Heatmap(
        z=values,
        zmin=0,
        zmax=top,
        colorscale=themes.load_scale(theme),
        text=np.asarray(words_YX, dtype=object) if small and words_YX is not None else None,
        texttemplate="%{text}" if small and words_YX is not None else None,
        hovertext=None if hover_YX is None else np.asarray(hover_YX, dtype=object),
        customdata=numbers_YXC,
        hovertemplate=hovertemplate,
        hoverongaps=False,
        xgap=gap,
        ygap=gap,
        showscale=colorbar is not None,
        colorbar=colorbar,
    )


def load_bar(theme: str, unit: str) -> dict[str, Any]:
    """Return the colour bar of a load scale that says what its numbers mean."""
    own = themes.colours(theme)
    return {
        "title": {"text": unit, "side": "right", "font": {"color": own["muted"], "size": 13}},
        "tickvals": [0, 1, 2, 3, 4],
        "ticktext": ["0", "1 = fair", "2", "3", "≥ 4"],
        "tickfont": {"color": own["muted"], "size": 12},
        "thickness": 12,
        "outlinewidth": 0,
    }


def share_marks(
    figure: go.Figure, theme: str, marks: pd.DataFrame, *, words: bool = True, **where: Any
) -> None:
    """Draw each mark of an overhead share, in per cent, as a line named at its right end."""
    for mark in records(marks):
        colour = themes.state_colour(mark["state"], theme)
        figure.add_hline(
            y=100 * mark["share"],
            line={"color": colour, "width": 1.5, "dash": "dash"},
            annotation={
                "text": f"{100 * mark['share']:.0f} %" + f": {mark['meaning']}" * words,
                "font": {"color": colour, "size": 13},
                "bgcolor": themes.colours(theme)["surface"],
                "xanchor": "left",
                "yanchor": "middle",
                "xshift": 4,
            },
            annotation_position="right",
            **where,
        )


def records(frame: pd.DataFrame) -> list[Line]:
    """Return the table's lines, values by column."""
    return [{str(name): value for name, value in line.items()} for line in frame.to_dict("records")]


def keyed(frame: pd.DataFrame, *names: str) -> dict[tuple[Any, ...], Line]:
    """Return the table's lines by their values in the columns `names`."""
    return {tuple(line[name] for name in names): line for line in records(frame)}


def largest(frame: pd.DataFrame, name: str) -> Line | None:
    """Return the line with the largest value in column `name`; None when it has no number."""
    known = frame[frame[name].notna()]
    return records(known.nlargest(1, name))[0] if len(known) else None


def label_words(frame: pd.DataFrame) -> str:
    """Return symbol and word of every label in the table."""
    found = [
        label for label in ("measured", "recorded", "modelled") if label in set(frame["label"])
    ]
    return " + ".join(label_word(label) for label in found)


def label_word(label: str) -> str:
    """Return symbol and word of one label."""
    state = themes.STATES[label]
    return f"{state.symbol} {state.word}"


def chosen_layers(frame: pd.DataFrame, layers: Sequence[int] | None) -> list[int]:
    """Return the layers to draw: those asked for and present, or at most `MAX_PANELS`."""
    present = sorted(set(frame["layer"].tolist()))
    if layers is not None:
        return [layer for layer in layers if layer in present]
    if len(present) <= MAX_PANELS:
        return present
    at = np.linspace(0, len(present) - 1, MAX_PANELS).round().astype(int)
    return [present[index] for index in at.tolist()]


def whole(value: float) -> str:
    """Write a whole number with thin spaces between thousands."""
    return f"{value:,.0f}".replace(",", "\u202f")


def percent(share: float, digits: int = 1) -> str:
    """Write a share of 0 to 1 in per cent, a dash for NaN."""
    return "–" if math.isnan(share) else f"{100 * share:.{digits}f} %"


def milliseconds(value: float) -> str:
    """Write a time with three figures, in µs, ms or s, a dash for NaN."""
    if math.isnan(value):
        return "–"
    if abs(value) < 0.1:
        return f"{1000 * value:.3g} µs"
    if value >= 10_000:
        return f"{value / 1000:.3g} s"
    return f"{value:.3g} ms" if value < 1000 else f"{whole(value)} ms"


def size(value: float) -> str:
    """Write bytes in the largest unit below them, a dash for NaN."""
    if math.isnan(value):
        return "–"
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.3g} GiB"


def visible(text: str) -> str:
    """Show a token's white space; plotly would swallow it. Markup in it is made harmless."""
    for char, shown in (("\n", "⏎"), ("\t", "⇥"), (" ", "␣"), ("&", "&amp;"), ("<", "&lt;")):
        text = text.replace(char, shown)
    return text or "∅"
