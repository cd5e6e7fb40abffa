"""Figure of number formats by layer."""

from __future__ import annotations

import math

import pandas as pd
import plotly.graph_objects as go

from workbench import theme as themes
from workbench.figures.canvas import Line, panels, percent, records, whole
from workbench.views.formats import FORMAT_FORMULA

PANELS = ("rows by format", "largest error of a sampled row")


def unit_formats(frame: pd.DataFrame, *, theme: str = "light") -> go.Figure:
    """Draw `views.unit_formats`: by layer, rows in INT8, run again and the rest, beside the error.

    Raises:
        ConfigError: a theme there is none of.
    """
    figure, places = panels(
        "Number formats of the experts' rows, by layer, in per cent of rows",
        _finding(frame),
        frame,
        theme,
        list(PANELS) if len(frame) else [],
        note=FORMAT_FORMULA,
        panel_height=330,
        horizontal_spacing=0.1,
    )
    if frame.empty:
        return figure
    (left, right), own = places, themes.colours(theme)
    lines = records(frame)
    hover = [_hover(line) for line in lines]
    full = [line["rows"] - line["int8_rows"] - line["rerun_rows"] for line in lines]
    for name, counts, colour, pattern in (
        ("INT8", [line["int8_rows"] for line in lines], own["accent"], ""),
        ("INT8, then run again", [line["rerun_rows"] for line in lines], own["text"], "x"),
        ("the engine's own", full, own["muted"], "/"),
    ):
        figure.add_trace(
            go.Bar(
                x=frame["layer"],
                y=[100 * n / max(1, line["rows"]) for n, line in zip(counts, lines, strict=True)],
                name=name,
                marker={"color": colour, "pattern": {"shape": pattern}},
                customdata=hover,
                hovertemplate="%{customdata}<extra></extra>",
            ),
            row=left[0],
            col=left[1],
        )
    figure.add_trace(
        go.Scatter(
            x=frame["layer"],
            y=100 * frame["worst_error"],
            mode="markers",
            marker={"symbol": "diamond", "size": 12, "color": own["accent"]},
            customdata=hover,
            hovertemplate="%{customdata}<extra></extra>",
            showlegend=False,
        ),
        row=right[0],
        col=right[1],
    )
    layers = frame["layer"].tolist()
    figure.update_xaxes(
        title="layer", tickvals=layers[:: max(1, len(layers) // 16)], showgrid=False
    )
    figure.update_yaxes(ticksuffix=" %", rangemode="tozero")
    figure.update_yaxes(range=[0, 104], row=left[0], col=left[1])
    figure.update_layout(barmode="stack", legend={"y": -0.2, "yanchor": "top"}, margin={"b": 110})
    return figure


def _finding(frame: pd.DataFrame) -> str:
    if frame.empty:
        return "no formats were chosen by unit"
    rows = max(1.0, float(frame["rows"].sum()))
    finding = (
        f"{percent(float(frame['int8_rows'].sum()) / rows, 0)} of {whole(rows)} rows in INT8, "
        f"{whole(float(frame['rerun_rows'].sum()))} run again"
    )
    sampled = frame.dropna(subset=["worst_error"])
    if sampled.empty:
        return f"{finding} · no row was sampled"
    worst = sampled.iloc[int(sampled["worst_error"].to_numpy().argmax())]
    return (
        f"{finding} · of {whole(float(frame['sampled_rows'].sum()))} sampled rows the worst is off "
        f"by {percent(float(worst['worst_error']), 1)}, in layer {int(worst['layer'])}"
    )


def _hover(line: Line) -> str:
    error = line["worst_error"]
    sampled = "no row sampled"
    if not math.isnan(error):
        sampled = f"worst of {whole(line['sampled_rows'])} sampled rows {percent(error, 2)} off"
    return (
        f"<b>layer {line['layer']}</b><br>{whole(line['int8_rows'])} of {whole(line['rows'])} rows "
        f"in INT8 ({percent(line['int8_share'], 1)})<br>{whole(line['int8_units'])} of "
        f"{whole(line['units'])} units voted to INT8, {whole(line['failed_units'])} predicted "
        f"wrong, {whole(line['rerun_rows'])} rows run again<br>"
        f"{line['switches_per_100_rows']:.1f} changes of format in 100 rows<br>{sampled}"
    )
