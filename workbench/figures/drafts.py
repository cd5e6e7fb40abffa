"""Figure of the draft's acceptance."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from workbench import theme as themes
from workbench.figures.canvas import Line, percent, records, sheet, whole
from workbench.views.drafts import DRAFT_FORMULA


def draft_acceptance(frame: pd.DataFrame, *, theme: str = "light") -> go.Figure:
    """Draw `views.draft_acceptance`: a line per domain over the place in the proposals.

    Raises:
        ConfigError: a theme there is none of.
    """
    figure = sheet(
        "Proposals of the draft that the target accepted, by place in the step, in per cent",
        _finding(frame),
        frame,
        theme,
        note=DRAFT_FORMULA,
        height=480,
    )
    for domain in themes.domain_order(frame["domain"]):
        own = frame[frame["domain"] == domain].sort_values("place")
        colour, marker = themes.domain_look(domain, theme)
        figure.add_trace(
            go.Scatter(
                x=own["place"],
                y=100 * own["acceptance"],
                name=themes.domain_name(domain),
                mode="lines+markers",
                marker={"symbol": marker, "size": 10, "color": colour},
                line={"width": 1.5, "color": colour},
                customdata=[_hover(line) for line in records(own)],
                hovertemplate="%{customdata}<extra></extra>",
                showlegend=True,
            )
        )
    if len(frame):
        places = sorted(set(frame["place"].tolist()))
        figure.update_xaxes(
            title="place in the proposals of a step",
            tickvals=places,
            range=[places[0] - 0.5, places[-1] + 0.5],
            showgrid=False,
        )
        figure.update_yaxes(range=[0, 104], ticksuffix=" %", rangemode="tozero")
        figure.update_layout(legend={"y": -0.2, "yanchor": "top"}, margin={"b": 110})
    return figure


def _finding(frame: pd.DataFrame) -> str:
    if frame.empty:
        return "no proposals"
    totals = frame.groupby("domain")[["proposed", "accepted"]].sum()
    rates = (totals["accepted"] / totals["proposed"]).sort_values()
    best, worst = str(rates.index[-1]), str(rates.index[0])
    accepted, proposed = float(totals["accepted"].sum()), float(totals["proposed"].sum())
    finding = f"{percent(accepted / proposed, 0)} of {whole(proposed)} proposals accepted"
    if len(rates) == 1:
        return finding
    return (
        f"{finding} · most in {themes.domain_name(best)} ({percent(rates.iloc[-1], 0)}), least in "
        f"{themes.domain_name(worst)} ({percent(rates.iloc[0], 0)})"
    )


def _hover(line: Line) -> str:
    return (
        f"<b>{themes.domain_name(line['domain'])}, place {line['place']}</b><br>"
        f"{percent(line['acceptance'], 1)}: {whole(line['accepted'])} of "
        f"{whole(line['proposed'])} proposals"
    )
