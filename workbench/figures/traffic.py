"""Figure of the traffic between devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import pandas as pd
import plotly.graph_objects as go

from engine.errors import ConfigError
from workbench import theme as themes
from workbench.figures.canvas import (
    Line,
    chosen_layers,
    heat,
    keyed,
    label_word,
    label_words,
    panels,
    percent,
    size,
    whole,
)
from workbench.views.traffic import TRAFFIC_FORMULA

MAX_WORDED = 10
"""Maps of more devices than this are drawn without numbers."""

QUANTITIES: dict[str, tuple[str, Callable[[float], str]]] = {
    "rows": ("slots", whole),
    "tokens": ("rows, one copy a device", whole),
    "bytes": ("bytes, one way", size),
}


def device_traffic(
    frame: pd.DataFrame,
    *,
    quantity: Literal["rows", "tokens", "bytes"] = "rows",
    layers: Sequence[int] | None = None,
    theme: str = "light",
) -> go.Figure:
    """Draw `views.device_traffic`: for each layer a map from home (down) to device (across).

    Args:
        frame: the view's table.
        quantity: what the cells hold.
        layers: layers to draw; None draws all, or six evenly spaced ones.
        theme: light or dark.

    Raises:
        ConfigError: a quantity or a theme there is none of.
    """
    if quantity not in QUANTITIES:
        raise ConfigError(f"quantity ({quantity!r}) must be one of {', '.join(QUANTITIES)}.")
    unit = QUANTITIES[quantity][0]
    shown = chosen_layers(frame, layers)
    homes, devices = _axis(frame["home"]), _axis(frame["device"])
    figure, places = panels(
        f"Traffic from home to the experts' devices by layer, in {unit}",
        _finding(frame),
        frame,
        theme,
        [f"layer {layer}" for layer in shown],
        note=TRAFFIC_FORMULA if quantity == "bytes" else "⌂ stays at home",
        cols=4,
        panel_height=max(170, min(420, 52 * len(homes))),
        horizontal_spacing=0.05,
        shared_yaxes=True,
        label=_labels(frame, quantity),
    )
    top = float(frame[quantity].max()) if frame[quantity].notna().any() else 1.0
    outlines: list[dict[str, Any]] = []
    for layer, (row, col) in zip(shown, places, strict=True):
        own = frame[frame["layer"] == layer]
        cells = _cells(own, homes, devices, quantity, theme, top or 1.0)
        figure.add_trace(cells, row=row, col=col)
        axes = figure.get_subplot(row, col)
        outlines += _outlines(homes, devices, theme, axes.xaxis.anchor, axes.yaxis.anchor)
    figure.update_layout(shapes=outlines)
    if shown:
        figure.update_xaxes(title="expert's device", **_ticks(devices))
        figure.update_xaxes(showgrid=False, zeroline=False)
    figure.update_yaxes(range=[len(homes) - 0.5, -0.5], **_ticks(homes))
    figure.update_yaxes(showgrid=False, zeroline=False)
    if shown:
        figure.update_yaxes(title="token's home", col=1)
    return figure


def _cells(
    own: pd.DataFrame,
    homes: list[int],
    devices: list[int],
    quantity: str,
    theme: str,
    top: float,
) -> go.Heatmap:
    """Return the map of one layer; cells without a line in the table are blank."""
    grid = own.pivot(index="home", columns="device", values=quantity)
    lines = keyed(own, "home", "device")
    words = [[_word(lines.get((home, to)), quantity) for to in devices] for home in homes]
    return heat(
        grid.reindex(index=homes, columns=devices).to_numpy(),
        theme=theme,
        words_YX=words if len(devices) <= MAX_WORDED else None,
        hover_YX=[[_hover(lines.get((home, to))) for to in devices] for home in homes],
        top=top,
    )


def _axis(values: pd.Series) -> list[int]:
    """Return the different devices; the unknown one, -1, last."""
    found = sorted(set(values.tolist()))
    return [value for value in found if value >= 0] + [value for value in found if value < 0]


def _ticks(devices: list[int]) -> dict[str, list[object]]:
    names = [str(device) if device >= 0 else "?" for device in devices]
    return {"tickvals": list(range(len(devices))), "ticktext": [*names]}


def _outlines(
    homes: list[int], devices: list[int], theme: str, y_axis: str, x_axis: str
) -> list[dict[str, Any]]:
    """Frame the cells whose rows stay at home, so that they are told apart without colour."""
    line = {"color": themes.colours(theme)["text"], "width": 1.5, "dash": "dot"}
    cells = [(devices.index(h), y) for y, h in enumerate(homes) if h >= 0 and h in devices]
    return [
        {
            "type": "rect",
            "xref": x_axis,
            "yref": y_axis,
            "x0": x - 0.46,
            "x1": x + 0.46,
            "y0": y - 0.46,
            "y1": y + 0.46,
            "line": line,
        }
        for x, y in cells
    ]


def _word(line: Line | None, quantity: str) -> str:
    """Write a cell's number; a house marks the cells whose rows stay at home."""
    if line is None:
        return ""
    return ("" if line["crosses"] else "⌂ ") + QUANTITIES[quantity][1](line[quantity])


def _hover(line: Line | None) -> str:
    if line is None:
        return ""
    device = line["device"]
    to = f"device {device}" if device >= 0 else "a device that is not known"
    way = "crosses" if line["crosses"] else "stays at home"
    return (
        f"<b>layer {line['layer']}: home {line['home']} to {to}</b> ({way})<br>"
        f"{whole(line['rows'])} slots, {line['label']}<br>"
        f"{whole(line['tokens'])} rows, one copy a device<br>"
        f"{size(line['bytes'])} one way, {line['bytes_label']}"
    )


def _finding(frame: pd.DataFrame) -> str:
    rows = float(frame["rows"].sum())
    if not rows:
        return "no rows"
    crossing = frame[frame["crosses"]]
    text = f"{percent(float(crossing['rows'].sum()) / rows)} of {whole(rows)} slots leave home"
    if frame["bytes"].notna().any():
        words = " + ".join(sorted(set(frame["bytes_label"])))
        text += f", {size(float(crossing['bytes'].sum()))} one way ({words})"
    unknown = float(frame[frame["device"] < 0]["rows"].sum())
    if unknown:
        text += f" · {whole(unknown)} slots under a table that is not known (?)"
    return text


def _labels(frame: pd.DataFrame, quantity: str) -> str:
    if frame.empty or quantity != "bytes":
        return label_words(frame)
    return " + ".join(label_word(label) for label in sorted(set(frame["bytes_label"])))
