"""Figure of the time of each rank."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from workbench import theme as themes
from workbench.figures.canvas import FOOT, HEAD, milliseconds, percent, records, sheet, size, whole
from workbench.views.ranks import RANK_FORMULA

PARTS = {
    "busy_ms": ("● computing", "compute"),
    "wait_ms": ("‖ waiting for a slower rank", "warn"),
    "transfer_ms": ("◆ waiting for rows on their way", "accent"),
}
"""Column, words and colour, in the order of the bar."""


def rank_times(frame: pd.DataFrame, *, theme: str = "light") -> go.Figure:
    """Draw `views.rank_times`: one bar for each rank, its mean step cut into work and waiting.

    Raises:
        ConfigError: a theme there is none of.
    """
    numbers = ["busy_ms", "wait_ms", "transfer_ms", "rows", "num_bytes", "messages"]
    means = frame.groupby("rank", as_index=False)[numbers].mean()
    means["ms"] = means[list(PARTS)].sum(axis=1)
    means["utilisation"] = means["busy_ms"] / means["ms"].where(means["ms"] > 0)
    figure = sheet(
        "Time of each rank in a step, mean over all steps, in milliseconds",
        _finding(means),
        frame,
        theme,
        note=RANK_FORMULA,
        height=HEAD + FOOT + 44 * max(4, len(means)),
    )
    if means.empty:
        return figure
    for column in PARTS:
        figure.add_trace(_bars(means, column, theme))
    figure.update_layout(barmode="stack", bargap=0.28, legend={"traceorder": "normal"})
    figure.update_xaxes(title="milliseconds a step", rangemode="tozero")
    figure.update_yaxes(
        tickvals=means["rank"].tolist(),
        ticktext=[
            f"rank {line['rank']}  {percent(line['utilisation'], 0)}" for line in records(means)
        ],
        autorange="reversed",
        showgrid=False,
    )
    return figure


def _bars(means: pd.DataFrame, column: str, theme: str) -> go.Bar:
    words, colour = PARTS[column]
    return go.Bar(
        y=means["rank"],
        x=means[column],
        orientation="h",
        name=words,
        marker={"color": themes.colours(theme)[colour], "line": {"width": 0}},
        customdata=[
            f"<b>rank {line['rank']}: {words}</b><br>"
            f"{line[column]:,.3f} of {line['ms']:,.3f} ms a step<br>"
            f"{percent(line['utilisation'])} utilised<br>"
            f"{whole(line['rows'])} slots a step<br>"
            f"{size(line['num_bytes'])} in {whole(line['messages'])} messages sent a step"
            for line in records(means)
        ],
        hovertemplate="%{customdata}<extra></extra>",
    )


def _finding(means: pd.DataFrame) -> str:
    if means.empty or means["utilisation"].isna().all():
        return "no ranks"
    least = records(means.sort_values("utilisation"))[0]
    return (
        f"least busy: rank {least['rank']}, {percent(least['utilisation'], 0)} of "
        f"{milliseconds(least['ms'])} a step; all ranks "
        f"{percent(means['busy_ms'].sum() / means['ms'].sum(), 0)}"
    )
