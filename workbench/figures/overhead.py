"""Figures of the routing overhead: by step, in all, by batch size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from workbench import theme as themes
from workbench.figures.canvas import (
    Line,
    milliseconds,
    panels,
    percent,
    records,
    share_marks,
    sheet,
    whole,
)
from workbench.views.overhead import MARKS, OVERHEAD_FORMULA, overhead_marks, overhead_state

SHOWN_STATES = ("within", "watch", "redesign")


def overhead_by_step(frame: pd.DataFrame, *, theme: str = "light") -> go.Figure:
    """Draw `views.overhead_by_step`: the share of each step, the marks, and the share of them all.

    Steps far above the others are drawn at the upper edge, and counted there.

    Raises:
        ConfigError: a theme there is none of.
    """
    timed = frame[frame["share"].notna()]
    figure = sheet(
        "Routing overhead of each step, in per cent of the step's time",
        _finding(timed),
        timed,
        theme,
        note=OVERHEAD_FORMULA,
        height=520,
    )
    if timed.empty:
        return figure
    top = _top(timed["share"])
    for state in SHOWN_STATES:
        own = timed[timed["state"] == state]
        if own.empty:
            continue
        look = themes.STATES[state]
        figure.add_trace(
            go.Scatter(
                x=own["step"],
                y=100 * own["share"].clip(upper=top),
                mode="markers",
                name=f"{look.symbol} {look.word}: {whole(len(own))} steps",
                marker={
                    "symbol": look.marker,
                    "size": 7,
                    "color": themes.state_colour(state, theme),
                    "opacity": 0.85,
                },
                customdata=[_step_hover(line) for line in records(own)],
                hovertemplate="%{customdata}<extra></extra>",
            )
        )
    whole_share = float(timed["routing_ms"].sum() / timed["step_ms"].sum())
    figure.add_trace(
        go.Scatter(
            x=[timed["step"].min(), timed["step"].max()],
            y=[100 * whole_share] * 2,
            mode="lines",
            name=f"all steps together: {percent(whole_share)}",
            line={"color": themes.colours(theme)["text"], "width": 2},
            hovertemplate=f"{_finding(timed)}<extra></extra>",
        )
    )
    share_marks(figure, theme, overhead_marks())
    above = int((timed["share"] > top).sum())
    edge = f", {above} above the edge" if above else ""
    figure.update_yaxes(title=f"share{edge}", ticksuffix=" %", range=[0, 100 * top * 1.04])
    figure.update_xaxes(title="step", showgrid=False)
    figure.update_layout(legend={"y": -0.2, "yanchor": "top"}, margin={"r": 170, "b": 116})
    return figure


def overhead_total(frame: pd.DataFrame, *, theme: str = "light") -> go.Figure:
    """Draw `views.overhead_total`: one bar against the two marks.

    Raises:
        ConfigError: a theme there is none of.
    """
    figure = sheet(
        "Routing overhead of all steps, in per cent of their time",
        _total_finding(frame),
        frame,
        theme,
        note=OVERHEAD_FORMULA,
        height=280,
    )
    if frame.empty:
        return figure
    line = records(frame)[0]
    look, colour = themes.STATES[line["state"]], themes.state_colour(line["state"], theme)
    share = float(line["share"])
    figure.add_trace(
        go.Bar(
            x=[100 * share],
            y=[""],
            orientation="h",
            marker={"color": colour, "cornerradius": 3},
            hovertemplate=f"{_total_finding(frame)}<extra></extra>",
            showlegend=False,
        )
    )
    for mark in MARKS:
        figure.add_vline(
            x=100 * mark.share,
            line={"color": themes.state_colour(mark.state, theme), "width": 1.5, "dash": "dash"},
            annotation_text=f"{100 * mark.share:.0f} %",
            annotation_font={"color": themes.state_colour(mark.state, theme), "size": 13},
            annotation_position="top",
        )
    figure.add_annotation(
        x=100 * share,
        y=0,
        yref="y",
        text=f"<b>{percent(share)}</b>  {look.symbol} {look.word}",
        font={"color": colour, "size": 16},
        bgcolor=themes.colours(theme)["surface"],
        xanchor="left",
        xshift=8,
        showarrow=False,
    )
    figure.update_xaxes(range=[0, max(15.0, 160 * share)], ticksuffix=" %", showgrid=False)
    figure.update_yaxes(visible=False)
    figure.update_layout(bargap=0.5)
    return figure


def overhead_by_batch(frame: pd.DataFrame, *, theme: str = "light") -> go.Figure:
    """Draw `views.overhead_by_batch`: share, with the steps' middle half, and time per row.

    Raises:
        ConfigError: a theme there is none of.
    """
    figure, places = panels(
        "Routing overhead by batch, rows a step",
        _batch_finding(frame),
        frame,
        theme,
        ["share of step time, in per cent", "routing time per row, in microseconds (logarithmic)"]
        if len(frame)
        else [],
        note=OVERHEAD_FORMULA,
        panel_height=330,
        horizontal_spacing=0.12,
    )
    if not places:
        return figure
    lines = records(frame)
    names = [batch_name(line["rows_from"], line["rows_to"]) for line in lines]
    figure.add_trace(_middle_half(names, lines, theme), row=1, col=1)
    for state in SHOWN_STATES:
        kept = [at for at, line in enumerate(lines) if line["state"] == state]
        if kept:
            shown = _batch_shares([names[at] for at in kept], [lines[at] for at in kept], theme)
            figure.add_trace(shown, row=1, col=1)
    share_marks(figure, theme, overhead_marks(), words=False, row=1, col=1)
    figure.add_trace(_time_per_row(names, lines, theme), row=1, col=2)
    figure.update_xaxes(
        type="category", categoryorder="array", categoryarray=names, title="rows a step"
    )
    figure.update_xaxes(showgrid=False)
    largest = float(np.nanmax(frame[["share", "share_p75"]].to_numpy()))
    figure.update_yaxes(ticksuffix=" %", range=[0, 110 * max(0.11, largest)], row=1, col=1)
    figure.update_yaxes(type="log", dtick=1, ticksuffix=" µs", row=1, col=2)
    figure.update_layout(legend={"y": -0.22, "yanchor": "top"}, margin={"b": 116})
    return figure


def batch_name(rows_from: int, rows_to: int) -> str:
    """Return a batch size as people write it: 1, 2–3, 4–7."""
    return str(rows_from) if rows_from == rows_to else f"{rows_from}–{rows_to}"


def _middle_half(names: Sequence[str], lines: Sequence[Line], theme: str) -> go.Scatter:
    """Return a bar for each batch size from the first to the third quartile of its steps."""
    return go.Scatter(
        x=[value for name in names for value in (name, name, None)],
        y=[
            value
            for line in lines
            for value in (100 * line["share_p25"], 100 * line["share_p75"], None)
        ],
        mode="lines",
        name="middle half of the steps",
        line={"width": 9, "color": themes.colours(theme)["rest"]},
        hoverinfo="skip",
    )


def _batch_shares(names: Sequence[str], lines: Sequence[Line], theme: str) -> go.Scatter:
    """Return a mark for the share of each batch size; all of them are of one state."""
    state = lines[0]["state"]
    look = themes.STATES[state]
    return go.Scatter(
        x=list(names),
        y=[100 * line["share"] for line in lines],
        mode="markers",
        name=f"{look.symbol} {look.word}",
        marker={"symbol": look.marker, "size": 13, "color": themes.state_colour(state, theme)},
        customdata=[_batch_hover(name, line) for name, line in zip(names, lines, strict=True)],
        hovertemplate="%{customdata}<extra></extra>",
    )


def _time_per_row(names: Sequence[str], lines: Sequence[Line], theme: str) -> go.Scatter:
    own = themes.colours(theme)
    return go.Scatter(
        x=list(names),
        y=[line["routing_us_per_row"] for line in lines],
        mode="lines+markers+text",
        text=[f"{line['routing_us_per_row']:,.0f}" for line in lines],
        textposition="top center",
        textfont={"color": own["muted"], "size": 12},
        cliponaxis=False,
        line={"color": own["accent"], "width": 2},
        marker={"size": 9, "color": own["accent"]},
        customdata=[_batch_hover(name, line) for name, line in zip(names, lines, strict=True)],
        hovertemplate="%{customdata}<extra></extra>",
        showlegend=False,
    )


def _top(shares: pd.Series) -> float:
    """Return the upper end of the share axis: all of it, unless a few steps would flatten it."""
    largest, usual = float(shares.max()), float(shares.quantile(0.98))
    return max(0.12, largest if largest <= 2 * usual else 1.3 * usual)


def _finding(timed: pd.DataFrame) -> str:
    if timed.empty:
        return "no step with times"
    routing, whole_ms = float(timed["routing_ms"].sum()), float(timed["step_ms"].sum())
    look = themes.STATES[overhead_state(routing / whole_ms)]
    return (
        f"{milliseconds(routing)} of {milliseconds(whole_ms)} = {percent(routing / whole_ms)} "
        f"{look.symbol} {look.word}"
    )


def _total_finding(frame: pd.DataFrame) -> str:
    if frame.empty:
        return "no step with times"
    line = records(frame)[0]
    return (
        f"{milliseconds(line['routing_ms'])} of {milliseconds(line['step_ms'])} in "
        f"{whole(line['steps'])} steps, {whole(line['steps_watch'])} of them above 5 % and "
        f"{whole(line['steps_redesign'])} above 10 %"
    )


def _batch_finding(frame: pd.DataFrame) -> str:
    if frame.empty:
        return "no step with rows and times"
    small = frame[frame["rows_to"] < 8]
    large = frame[frame["rows_from"] >= 8]

    def pooled(part: pd.DataFrame) -> str:
        if part.empty:
            return "no steps"
        return percent(float(part["routing_ms"].sum() / part["step_ms"].sum()))

    return f"below 8 rows {pooled(small)}, from 8 rows {pooled(large)}"


def _step_hover(line: Line) -> str:
    look = themes.STATES[line["state"]]
    return (
        f"<b>step {line['step']}: {percent(line['share'], 2)}</b> {look.symbol} {look.word}<br>"
        f"{line['routing_ms']:.3f} ms of {line['step_ms']:.3f} ms<br>"
        f"{whole(line['num_rows'])} rows of {whole(line['num_running'])} requests, "
        f"table version {line['table_version']}"
    )


def _batch_hover(name: str, line: Line) -> str:
    return (
        f"<b>{name} rows a step: {percent(line['share'], 2)}</b><br>"
        f"{line['routing_ms']:.3f} ms of {line['step_ms']:.3f} ms in "
        f"{whole(line['steps'])} steps, {whole(line['rows'])} rows<br>"
        f"steps' own shares: median {percent(line['share_p50'], 2)}, middle half "
        f"{percent(line['share_p25'], 2)} to {percent(line['share_p75'], 2)}<br>"
        f"{line['routing_us_per_row']:.1f} µs per row"
    )
