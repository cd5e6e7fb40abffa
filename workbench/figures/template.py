"""The theme as a plotly template, so that a figure only says what it shows."""

from __future__ import annotations

import plotly.graph_objects as go

from workbench.theme import FONT, PALETTE, colours


def template(theme: str) -> go.layout.Template:
    """Return the theme as a plotly template."""
    own = colours(theme)
    axis = {
        "gridcolor": own["line"],
        "zerolinecolor": own["line"],
        "linecolor": own["line"],
        "tickcolor": own["line"],
        "tickfont": {"color": own["muted"], "size": 13},
        "title": {"font": {"color": own["muted"], "size": 14}, "standoff": 10},
        "automargin": True,
        "zeroline": False,
    }
    return go.layout.Template(
        layout={
            "paper_bgcolor": own["surface"],
            "plot_bgcolor": own["surface"],
            "font": {"family": FONT, "size": 14, "color": own["text"]},
            "colorway": list(PALETTE[theme]),
            "xaxis": axis,
            "yaxis": axis,
            "title": {
                "x": 0,
                "xref": "paper",
                "xanchor": "left",
                "y": 1,
                "yref": "container",
                "yanchor": "top",
                "pad": {"t": 22, "l": 0},
                "font": {"size": 21, "color": own["text"], "weight": 600},
                "subtitle": {"font": {"size": 14, "color": own["muted"]}},
            },
            "hoverlabel": {
                "bgcolor": own["sunken"],
                "bordercolor": own["line"],
                "font": {"family": FONT, "size": 13, "color": own["text"]},
                "align": "left",
            },
            "legend": {
                "orientation": "h",
                "x": 0,
                "xanchor": "left",
                "y": 1,
                "yanchor": "bottom",
                "font": {"color": own["muted"], "size": 13},
                "bgcolor": "rgba(0,0,0,0)",
            },
            "margin": {"l": 72, "r": 32, "t": 126, "b": 64},
            "hovermode": "closest",
        }
    )
