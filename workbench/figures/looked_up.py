"""Figure of what is looked up instead of worked out."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from workbench import theme as themes
from workbench.figures.canvas import Line, percent, records, sheet, whole
from workbench.views.looked_up import LOOK_UP_FORMULA

MIN_ROOM = 5
"""Bars there is room for at least."""


def look_ups(frame: pd.DataFrame, *, theme: str = "light") -> go.Figure:
    """Draw `views.look_ups`: a bar for each number of rows, what was found and what was not.

    Raises:
        ConfigError: a theme there is none of.
    """
    figure = sheet(
        "Look-ups of placements and orders over rows a step: found, and worked out",
        _finding(frame),
        frame,
        theme,
        note=LOOK_UP_FORMULA,
        height=440,
    )
    if frame.empty:
        return figure
    own, lines = themes.colours(theme), records(frame)
    for name, column, colour in (
        ("found", "found", own["accent"]),
        ("worked out", "missed", own["rest"]),
    ):
        figure.add_trace(
            go.Bar(
                x=[str(line["rows"]) for line in lines],
                y=[int(line[column]) for line in lines],
                name=name,
                marker={"color": colour},
                customdata=[_hover(line) for line in lines],
                hovertemplate="%{customdata}<extra></extra>",
                text=[percent(line["share"]) if column == "found" else "" for line in lines],
                textposition="inside",
                insidetextanchor="middle",
                showlegend=True,
            )
        )
    figure.update_layout(barmode="stack", bargap=0.3)
    figure.update_xaxes(title="rows of the step", type="category", showgrid=False)
    # One or two bars are to stay slender.
    figure.update_xaxes(range=[-0.5, max(len(lines), MIN_ROOM) - 0.5])
    figure.update_yaxes(title="look-ups", rangemode="tozero")
    return figure


def _hover(line: Line) -> str:
    asked = int(line["found"]) + int(line["missed"])
    return (
        f"<b>steps of {whole(line['rows'])} rows</b><br>"
        f"{percent(line['share'])} found: {whole(line['found'])} of {whole(asked)} in "
        f"{whole(line['steps'])} steps"
    )


def _finding(frame: pd.DataFrame) -> str:
    found = int(frame["found"].sum())
    asked = found + int(frame["missed"].sum())
    if not asked:
        return "nothing was looked up"
    best = frame.iloc[int(frame["share"].to_numpy().argmax())]
    return (
        f"{whole(found)} of {whole(asked)} look-ups found, {percent(found / asked)}; most in steps "
        f"of {whole(best['rows'])} rows ({percent(best['share'])})"
    )
