"""Figure of what capacity drops."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from workbench import theme as themes
from workbench.figures.canvas import FOOT, HEAD, percent, records, sheet, whole
from workbench.views.dropped import DROPPED_FORMULA


def dropped_slots(frame: pd.DataFrame, *, theme: str = "light") -> go.Figure:
    """Draw `views.dropped_slots`: for each layer a bar an expert, what stayed and what was dropped.

    Raises:
        ConfigError: a theme there is none of.
    """
    figure = sheet(
        "Slots (pairs of row and expert) of each expert by layer: run, and dropped",
        _finding(frame),
        frame,
        theme,
        note=DROPPED_FORMULA,
        height=HEAD + FOOT + 360,
    )
    if frame.empty:
        return figure
    own, lines = themes.colours(theme), records(frame)
    names = [[str(line["layer"]) for line in lines], [str(line["expert"]) for line in lines]]
    dropped = [int(line["dropped"]) for line in lines]
    for name, colour, heights in (
        ("run", own["accent"], [int(line["slots"]) - int(line["dropped"]) for line in lines]),
        ("dropped", themes.state_colour("redesign", theme), dropped),
    ):
        figure.add_trace(
            go.Bar(
                x=names,
                y=heights,
                name=name,
                marker={"color": colour},
                customdata=[_hover(line) for line in lines],
                hovertemplate="%{customdata}<extra></extra>",
            )
        )
    figure.update_layout(barmode="stack", bargap=0.15)
    figure.update_xaxes(title="expert, by layer", showgrid=False)
    figure.update_yaxes(title="slots")
    return figure


def _hover(line: dict[str, object]) -> str:
    share = float(line["share"])  # type: ignore[arg-type]
    lost = f", {percent(share)}" if share == share else ""
    return (
        f"<b>layer {line['layer']}, expert {line['expert']}</b><br>"
        f"{whole(line['dropped'])} of {whole(line['slots'])} slots dropped{lost}"  # type: ignore[arg-type]
    )


def _finding(frame: pd.DataFrame) -> str:
    asked, lost = int(frame["slots"].sum()), int(frame["dropped"].sum())
    if not asked:
        return "no rows"
    if not lost:
        return f"none of {whole(asked)} slots was dropped"
    worst = frame.iloc[int(frame["dropped"].to_numpy().argmax())]
    return (
        f"{whole(lost)} of {whole(asked)} slots dropped, {percent(lost / asked)}; most of expert "
        f"{worst['expert']} of layer {worst['layer']}: {whole(int(worst['dropped']))}"
    )
