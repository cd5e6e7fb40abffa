"""Figures of the time of a step by stage."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from workbench import theme as themes
from workbench.figures.canvas import FOOT, HEAD, milliseconds, percent, records, sheet, whole
from workbench.views.stages import STAGE_FORMULA

KINDS = ("routing", "compute", "rest")
MAX_STEPS = 240


def stage_totals(frame: pd.DataFrame, *, theme: str = "light") -> go.Figure:
    """Draw `views.stage_totals`: one bar for each stage, in the order of a step.

    Raises:
        ConfigError: a theme there is none of.
    """
    figure = sheet(
        "Time of each stage, in per cent of all step time",
        _totals_finding(frame),
        frame,
        theme,
        note=STAGE_FORMULA,
        height=HEAD + FOOT + 28 * max(8, len(frame)),
    )
    for kind in KINDS:
        own = frame[frame["kind"] == kind]
        if len(own):
            figure.add_trace(_total_bars(own, kind, theme))
    if len(frame):
        symbols = [
            f"{stage}  {themes.STATES[kind].symbol}"
            for stage, kind in zip(frame["stage"], frame["kind"], strict=True)
        ]
        figure.update_yaxes(
            categoryorder="array",
            categoryarray=frame["stage"].tolist(),
            autorange="reversed",
            tickmode="array",
            tickvals=frame["stage"].tolist(),
            ticktext=symbols,
            showgrid=False,
            tickfont={"color": themes.colours(theme)["text"]},
        )
        top = 100 * float(frame["share"].max())
        figure.update_xaxes(
            title="share of step time", ticksuffix=" %", range=[0, top * 1.28], showgrid=False
        )
        figure.update_layout(bargap=0.28)
    return figure


def stage_times(
    frame: pd.DataFrame, *, max_steps: int = MAX_STEPS, theme: str = "light"
) -> go.Figure:
    """Draw `views.stage_times`: the steps one after another, each stacked by kind of stage.

    Args:
        frame: the view's table.
        max_steps: only the last so many steps are drawn.
        theme: light or dark.

    Raises:
        ConfigError: a theme there is none of.
    """
    all_steps = frame["step"].drop_duplicates()
    steps = all_steps.tail(max_steps)
    shown = frame[frame["step"].isin(steps)]
    drawn = f"the last {len(steps)} of {len(all_steps)}" if len(steps) < len(all_steps) else "all"
    figure = sheet(
        "Time of each step by kind of stage, in milliseconds",
        f"{drawn} {whole(len(steps))} steps" if drawn == "all" else f"{drawn} steps",
        frame,
        theme,
        note="prompt steps have many rows and take longer",
        height=500,
    )
    for kind in KINDS:
        own = shown[shown["kind"] == kind]
        if own.empty:
            continue
        by_step = own.groupby("step", sort=False)["ms"].sum()
        figure.add_trace(
            go.Bar(
                x=by_step.index,
                y=by_step,
                name=_kind_word(kind),
                marker={"color": themes.state_colour(kind, theme), "line": {"width": 0}},
                customdata=_step_hovers(own, kind),
                hovertemplate="%{customdata}<extra></extra>",
            )
        )
    if len(frame):
        figure.update_layout(
            barmode="stack",
            legend={"traceorder": "normal"},
            bargap=0.0 if len(steps) > 80 else 0.15,
        )
        figure.update_xaxes(title="step", showgrid=False)
        figure.update_yaxes(title="milliseconds", rangemode="tozero")
    return figure


def _total_bars(own: pd.DataFrame, kind: str, theme: str) -> go.Bar:
    """Return a bar for each stage of one kind, with its share and its time a step beside it."""
    return go.Bar(
        y=own["stage"],
        x=100 * own["share"],
        orientation="h",
        name=_kind_word(kind),
        marker={"color": themes.state_colour(kind, theme), "cornerradius": 3},
        text=[
            f"{percent(line['share'])}  ·  {milliseconds(line['ms_per_step'])} a step"
            for line in records(own)
        ],
        textposition="outside",
        textfont={"size": 13},
        cliponaxis=False,
        customdata=[
            f"<b>{line['stage']}</b> ({themes.STATES[kind].word})<br>"
            f"{percent(line['share'], 3)} of all step time<br>"
            f"{line['ms']:,.3f} ms in all<br>"
            f"{line['ms_per_step']:,.4f} ms a step, mean of {whole(line['steps'])} steps"
            for line in records(own)
        ],
        hovertemplate="%{customdata}<extra></extra>",
    )


def _kind_word(kind: str) -> str:
    state = themes.STATES[kind]
    return f"{state.symbol} {state.word}"


def _step_hovers(own: pd.DataFrame, kind: str) -> list[str]:
    texts = []
    for step, lines in own.groupby("step", sort=False):
        listed = "<br>".join(
            f"{line['stage']} {line['ms']:.3f} ms"
            for line in records(lines)
            if line["ms"] == line["ms"]
        )
        total = f"{lines['ms'].sum():.3f} ms, {percent(lines['share'].sum(), 2)}"
        rows = lines["num_rows"].iloc[0]
        texts.append(
            f"<b>step {step}, {whole(rows)} rows: {themes.STATES[kind].word}</b><br>"
            f"{total} of the step<br>{listed}"
        )
    return texts


def _totals_finding(frame: pd.DataFrame) -> str:
    if frame.empty:
        return "no steps"
    share = frame.groupby("kind")["share"].sum()
    parts = [f"{themes.STATES[kind].word} {percent(share.get(kind, 0.0))}" for kind in KINDS]
    return (
        " · ".join(parts)
        + f" · {milliseconds(frame['ms'].sum())} in {whole(frame['steps'].max())} steps"
    )
