"""Figure of the balance, every measure with its formula."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from workbench import theme as themes
from workbench.figures.canvas import largest, panels, records

NAMES = {
    "max_over_mean": "Max / mean",
    "coefficient_of_variation": "Coefficient of variation",
    "gini": "Gini coefficient",
    "entropy": "Entropy",
    "idle_share": "Idle share",
}
EVEN = {
    "max_over_mean": 1.0,
    "coefficient_of_variation": 0.0,
    "gini": 0.0,
    "entropy": 1.0,
    "idle_share": 0.0,
}
"""The value of a perfectly even load, by measure."""


def load_balance(frame: pd.DataFrame, *, theme: str = "light") -> go.Figure:
    """Draw `views.load_balance`: for each measure how far every layer is from even.

    Raises:
        ConfigError: a theme there is none of.
    """
    per = str(frame["per"].iloc[0]) if len(frame) else "expert"
    shown = [measure for measure in NAMES if measure in set(frame["measure"])]
    own = themes.colours(theme)
    formulas = frame.drop_duplicates("measure").set_index("measure")["formula"]
    titles = [
        f"<b>{NAMES[measure]}</b><br><span style='font-size:12px;color:{own['muted']}'>"
        f"{_broken(formulas[measure])}</span>"
        for measure in shown
    ]
    figure, places = panels(
        f"Balance between {per}s by layer, without unit",
        _finding(frame, per),
        frame,
        theme,
        titles,
        cols=3,
        panel_height=190,
        gap=150,
        head=200,
        note=f"n: slots of each {per}; X: number of {per}s",
        horizontal_spacing=0.07,
    )
    figure.update_annotations(align="left")
    for measure, (row, col) in zip(shown, places, strict=True):
        lines = frame[frame["measure"] == measure]
        for trace in _lollipops(lines, EVEN[measure], theme):
            figure.add_trace(trace, row=row, col=col)
        figure.add_hline(
            y=EVEN[measure],
            line={"color": own["text"], "width": 1.2, "dash": "dot"},
            row=row,
            col=col,
        )
        layers = lines["layer"].tolist()
        figure.update_xaxes(
            title="layer",
            tickvals=layers[:: max(1, len(layers) // 12)],
            range=[layers[0] - 0.6, layers[-1] + 0.6],
            showgrid=False,
            row=row,
            col=col,
        )
        figure.update_yaxes(range=_range(lines["value"], EVEN[measure]), row=row, col=col)
    return figure


def _lollipops(lines: pd.DataFrame, even: float, theme: str) -> list[go.Scatter]:
    colour, few = themes.colours(theme)["accent"], len(lines) <= 12
    stems = go.Scatter(
        x=[value for layer in lines["layer"] for value in (layer, layer, None)],
        y=[value for found in lines["value"] for value in (even, found, None)],
        mode="lines",
        line={"color": colour, "width": 3 if few else 1.5},
        hoverinfo="skip",
        showlegend=False,
    )
    heads = go.Scatter(
        x=lines["layer"],
        y=lines["value"],
        mode="markers+text" if few else "markers",
        text=[f"{value:.2f}" for value in lines["value"]],
        textposition="bottom center" if even == 1.0 and lines["value"].max() <= 1 else "top center",
        textfont={"size": 12},
        cliponaxis=False,
        marker={"color": colour, "size": 10 if few else 5},
        customdata=[
            f"<b>layer {line['layer']}: {NAMES[line['measure']]} {line['value']:.4f}</b><br>"
            f"of {line['units']} {line['per']}s<br>{_broken(line['formula'])}"
            for line in records(lines)
        ],
        hovertemplate="%{customdata}<extra></extra>",
        showlegend=False,
    )
    return [stems, heads]


def _range(values: pd.Series, even: float) -> list[float]:
    """Return an axis from even to the worst, never so short that a trifle looks large."""
    found = values.dropna()
    low, high = min([even, *found]), max([even, *found])
    span = max(high - low, 0.2)
    if even > (low + high) / 2:
        return [min(low, even - span) - 0.1 * span, even + 0.35 * span]
    return [even - 0.1 * span, max(high, even + span) + 0.35 * span]


def _finding(frame: pd.DataFrame, per: str) -> str:
    worst = largest(frame[frame["measure"] == "max_over_mean"], "value")
    if worst is None:
        return "no rows"
    return (
        f"least even: layer {worst['layer']}, whose busiest {per} has {worst['value']:.2f} × the "
        f"mean of {worst['units']} {per}s · dotted: perfectly even"
    )


def _broken(formula: str) -> str:
    """Put the parts of a formula on lines of their own."""
    return formula.replace("; ", "<br>").replace("<br>", ";<br>", 1)
