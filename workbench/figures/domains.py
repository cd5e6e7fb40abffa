"""Figure of the load by domain."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go

from workbench import theme as themes
from workbench.figures.canvas import (
    Line,
    chosen_layers,
    heat,
    keyed,
    largest,
    load_bar,
    panels,
    percent,
    whole,
)
from workbench.figures.load import load_word


def domain_load(
    frame: pd.DataFrame, *, layers: Sequence[int] | None = None, theme: str = "light"
) -> go.Figure:
    """Draw `views.domain_load`: for each layer a map of domains x experts, coloured by load.

    Args:
        frame: the view's table.
        layers: layers to draw; None draws all, or six evenly spaced ones.
        theme: light or dark.

    Raises:
        ConfigError: a theme there is none of.
    """
    shown = chosen_layers(frame, layers)
    domains = themes.domain_order(frame["domain"])
    figure, places = panels(
        "Load of each expert by domain, in multiples of its fair share",
        _finding(frame),
        frame,
        theme,
        [f"layer {layer}" for layer in shown],
        note="load = slots of the expert / (slots of the domain in the layer / number of experts)",
        panel_height=max(120, min(420, 29 * len(domains))),
        horizontal_spacing=0.06,
        shared_yaxes=True,
        gap=64,
    )
    for layer, (row, col) in zip(shown, places, strict=True):
        own = frame[frame["layer"] == layer]
        grid = own.pivot(index="domain", columns="expert", values="load").loc[domains]
        lines = keyed(own, "domain", "expert")
        bar = load_bar(theme, "× fair share") if (row, col) == (1, 1) else None
        figure.add_trace(
            heat(
                grid.to_numpy(),
                theme=theme,
                words_YX=[[load_word(load) for load in line] for line in grid.to_numpy()],
                hover_YX=[[_hover(lines[domain, at]) for at in grid.columns] for domain in domains],
                top=themes.LOAD_TOP,
                colorbar=bar,
            ),
            row=row,
            col=col,
        )
        last = row == places[-1][0] or (row, col) not in [(r - 1, c) for r, c in places]
        every = max(1, len(grid.columns) // 16)
        figure.update_xaxes(
            title="expert" if last else None,
            tickvals=list(range(0, len(grid.columns), every)),
            row=row,
            col=col,
        )
    figure.update_yaxes(
        tickvals=list(range(len(domains))),
        ticktext=[themes.domain_name(domain) for domain in domains],
        range=[len(domains) - 0.5, -0.5],
    )
    figure.update_xaxes(showgrid=False, zeroline=False)
    figure.update_yaxes(showgrid=False, zeroline=False)
    return figure


def _finding(frame: pd.DataFrame) -> str:
    top = largest(frame, "load")
    if top is None:
        return "no rows"
    return (
        f"most specialised: expert {top['expert']} of layer {top['layer']} runs "
        f"{percent(top['share'], 0)} of {themes.domain_name(top['domain'])}, "
        f"{top['load']:.1f} × its fair share and {top['lift']:.1f} × its load over all domains"
    )


def _hover(line: Line) -> str:
    return (
        f"<b>{themes.domain_name(line['domain'])}, layer {line['layer']}, "
        f"expert {line['expert']}</b><br>"
        f"{line['load']:.3f} × fair share<br>{line['lift']:.3f} × its load over all domains<br>"
        f"{percent(line['share'], 2)} of the domain's slots<br>"
        f"{whole(line['rows'])} slots"
    )
