"""Figure of the jump rate."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from workbench import theme as themes
from workbench.figures.canvas import Line, panels, percent, records, whole

MAX_WORDED = 16
"""More layers than this are drawn small and without numbers."""

CHOICES = {"set": "all K experts, in any order", "first": "the best expert"}


def jump_rate(frame: pd.DataFrame, *, theme: str = "light") -> go.Figure:
    """Draw `views.jump_rate`: rate by layer, beside the rate that unrelated tokens would have.

    With a table by domain, each domain has its own line.

    Raises:
        ConfigError: a theme there is none of.
    """
    figure, places = panels(
        "Neighbouring tokens that choose other experts, by layer, in per cent of pairs",
        _finding(frame),
        frame,
        theme,
        list(CHOICES.values()) if len(frame) else [],
        note="rate = pairs whose choices differ / pairs of neighbouring tokens",
        panel_height=330,
        horizontal_spacing=0.07,
        shared_yaxes=True,
    )
    domains = themes.domain_order(frame["domain"])
    for (choice, _), (row, col) in zip(CHOICES.items(), places, strict=False):
        for domain in domains:
            own = frame[(frame["choice"] == choice) & (frame["domain"] == domain)]
            alone = len(domains) == 1
            for trace in _lines(own, domain, alone, theme):
                trace.showlegend = col == 1 and trace.name is not None
                figure.add_trace(trace, row=row, col=col)
    if len(frame):
        layers = sorted(set(frame["layer"].tolist()))
        figure.update_xaxes(
            title="layer",
            tickvals=layers[:: max(1, len(layers) // 16)],
            range=[layers[0] - 0.5, layers[-1] + 0.5],
            showgrid=False,
        )
        figure.update_yaxes(range=[0, 104], ticksuffix=" %", rangemode="tozero")
        figure.update_layout(legend={"y": -0.2, "yanchor": "top"}, margin={"b": 110})
    return figure


def _lines(own: pd.DataFrame, domain: str, alone: bool, theme: str) -> list[go.Scatter]:
    """Return the gap between expected and measured, the expected rates, the measured ones."""
    colour, marker = (
        (themes.colours(theme)["accent"], "circle") if alone else themes.domain_look(domain, theme)
    )
    muted = themes.colours(theme)["muted"]
    few = len(own) <= MAX_WORDED
    hover = [_hover(line) for line in records(own)]
    rate = go.Scatter(
        x=own["layer"],
        y=100 * own["rate"],
        name="neighbours" if alone else themes.domain_name(domain),
        mode=("markers+text" if few else "markers") if alone else "lines+markers",
        text=[percent(value, 0) for value in own["rate"]] if alone else None,
        textposition="middle right",
        textfont={"color": colour, "size": 14},
        marker={"symbol": marker, "size": (13 if few else 6) if alone else 9, "color": colour},
        line={"width": 1.5, "color": colour},
        customdata=hover,
        hovertemplate="%{customdata}<extra></extra>",
    )
    if not alone:
        return [rate]
    gaps = go.Scatter(
        x=[value for layer in own["layer"] for value in (layer, layer, None)],
        y=[
            value
            for low, high in zip(own["rate"], own["expected"], strict=True)
            for value in (100 * low, 100 * high, None)
        ],
        mode="lines",
        line={"width": 3, "color": themes.colours(theme)["line"]},
        hoverinfo="skip",
    )
    expected = go.Scatter(
        x=own["layer"],
        y=100 * own["expected"],
        name="expected of unrelated tokens with the same load",
        mode="markers",
        marker={
            "symbol": "diamond-open",
            "size": 12 if few else 6,
            "color": muted,
            "line": {"width": 2},
        },
        customdata=hover,
        hovertemplate="%{customdata}<extra></extra>",
    )
    return [gaps, expected, rate]


def _finding(frame: pd.DataFrame) -> str:
    firsts = frame[(frame["choice"] == "first") & (frame["pairs"] > 0)]
    if firsts.empty:
        return "no pair of neighbouring tokens"
    pairs = float(firsts["pairs"].sum())
    rate = float(firsts["jumps"].sum()) / pairs
    expected = float((firsts["expected"] * firsts["pairs"]).sum()) / pairs
    per_layer = pairs / firsts["layer"].nunique()
    kin = "" if set(firsts["domain"]) == {"all"} else " of the same domain"
    return (
        f"the best expert changes in {percent(rate, 0)} of pairs; unrelated tokens{kin} would "
        f"change in {percent(expected, 0)} · all layers, {whole(per_layer)} pairs in each"
    )


def _hover(line: Line) -> str:
    head = "" if line["domain"] == "all" else f"{themes.domain_name(line['domain'])}, "
    return (
        f"<b>{head}layer {line['layer']}: {CHOICES[line['choice']]}</b><br>"
        f"rate {percent(line['rate'], 2)}: {whole(line['jumps'])} of "
        f"{whole(line['pairs'])} pairs<br>expected {percent(line['expected'], 2)}"
    )
