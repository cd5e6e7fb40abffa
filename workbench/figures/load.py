"""Figures of the load by expert and by device."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from workbench import theme as themes
from workbench.figures.canvas import (
    FOOT,
    HEAD,
    heat,
    largest,
    load_bar,
    percent,
    sheet,
    whole,
)
from workbench.views.devices import DEVICE_LOAD_FORMULA
from workbench.views.load import LOAD_FORMULA


def expert_load(frame: pd.DataFrame, *, theme: str = "light") -> go.Figure:
    """Draw `views.expert_load`: a map of layers x experts, coloured by load.

    Raises:
        ConfigError: a theme there is none of.
    """
    return _map(frame, "expert", theme)


def device_load(frame: pd.DataFrame, *, theme: str = "light") -> go.Figure:
    """Draw `views.device_load`: a map of layers x devices, coloured by load.

    Raises:
        ConfigError: a theme there is none of.
    """
    return _map(frame, "device", theme)


def _map(frame: pd.DataFrame, unit: str, theme: str) -> go.Figure:
    layers = sorted(set(frame["layer"].tolist()))
    figure = sheet(
        f"Load of each {unit} by layer, in multiples of its fair share",
        _finding(frame, unit),
        frame,
        theme,
        note=LOAD_FORMULA if unit == "expert" else DEVICE_LOAD_FORMULA,
        height=HEAD + FOOT + max(220, min(640, 62 * len(layers))),
    )
    if frame.empty:
        return figure
    grid = frame.pivot(index="layer", columns=unit, values="load")
    names = ["layer", unit, "load", "share", "rows"]
    numbers = frame.sort_values(["layer", unit])[names].to_numpy(float)
    figure.add_trace(
        heat(
            grid.to_numpy(),
            theme=theme,
            words_YX=[[load_word(load) for load in row] for row in grid.to_numpy()],
            numbers_YXC=numbers.reshape(*grid.shape, len(names)),
            hovertemplate=(
                f"<b>layer %{{customdata[0]}}, {unit} %{{customdata[1]}}</b><br>"
                "%{customdata[2]:.3f} × fair share<br>%{customdata[3]:.2%} of the layer<br>"
                "%{customdata[4]:,} slots<extra></extra>"
            ),
            top=themes.LOAD_TOP,
            colorbar=load_bar(theme, "× fair share"),
        )
    )
    every = max(1, len(layers) // 16)
    figure.update_yaxes(
        title="layer",
        autorange="reversed",
        tickvals=list(range(0, len(layers), every)),
        ticktext=[str(layer) for layer in layers[::every]],
        showgrid=False,
        zeroline=False,
    )
    units = len(grid.columns)
    figure.update_xaxes(
        title=unit,
        tickvals=list(range(0, units, max(1, units // 16))),
        showgrid=False,
        zeroline=False,
    )
    return figure


def _finding(frame: pd.DataFrame, unit: str) -> str:
    busiest = largest(frame, "load")
    if busiest is None:
        return "no rows"
    idle = int(((frame["rows"] == 0) & frame["load"].notna()).sum())
    rows = float(frame.groupby("layer")["rows"].sum().max())
    return (
        f"busiest: {unit} {busiest[unit]} of layer {busiest['layer']} with "
        f"{busiest['load']:.2f} × its fair share, {percent(busiest['share'])} of the layer · "
        f"{idle} idle · {whole(rows)} slots a layer"
    )


def load_word(load: float) -> str:
    """Say a load in a cell: idle, or a multiple of the fair share."""
    if load != load:
        return ""
    return "idle" if load == 0 else f"{load:.1f}×"
