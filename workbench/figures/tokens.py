"""Figure of the experts each token went to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from workbench import theme as themes
from workbench.figures.canvas import Line, chosen_layers, heat, panels, records, visible

MAX_TOKENS = 64
WEIGHT_BAR = {
    "title": {"text": "weight", "side": "right"},
    "thickness": 12,
    "outlinewidth": 0,
    "tickvals": [0, 0.25, 0.5, 0.75, 1],
}
"""The colour bar of the map, as plotly takes it."""


def token_experts(
    frame: pd.DataFrame,
    *,
    num_experts: int,
    request_id: int | None = None,
    layers: Sequence[int] | None = None,
    max_tokens: int = MAX_TOKENS,
    theme: str = "light",
) -> go.Figure:
    """Draw `views.token_experts`: for each layer a map of experts x tokens, coloured by weight.

    A line joins the best expert of each token with the next one's: where it is level, neighbours
    agree; where it jumps, they do not.

    Args:
        frame: the view's table.
        num_experts: logical experts of a layer (`trace.start.num_experts`).
        request_id: whose tokens; None takes the first request of the table.
        layers: layers to draw; None draws all, or six evenly spaced ones.
        max_tokens: only the first so many tokens are drawn.
        theme: light or dark.

    Raises:
        ConfigError: a theme there is none of.
    """
    if request_id is None and len(frame):
        request_id = int(frame["request_id"].iloc[0])
    own = frame[frame["request_id"] == request_id]
    # A token that ran again has several lines: count runs, not positions.
    own = own.assign(token=own.groupby("layer").cumcount())
    own = own[own["token"] < max_tokens]
    shown = chosen_layers(own, layers)
    figure, places = panels(
        "Experts of each token by layer, coloured by the weight of the expert, 0 to 1",
        _finding(frame, own, request_id),
        own,
        theme,
        [f"layer {layer}" for layer in shown],
        note="the line joins the best experts",
        cols=1,
        panel_height=max(90, min(360, 15 * num_experts)),
        gap=34,
        foot=110,
        shared_xaxes=True,
    )
    for layer, (row, col) in zip(shown, places, strict=True):
        lines = own[own["layer"] == layer]
        bar = WEIGHT_BAR if row == 1 else None
        figure.add_trace(_cells(lines, num_experts, theme, bar), row=row, col=col)
        figure.add_trace(_path(lines, theme), row=row, col=col)
    if shown:
        texts = [visible(text) for text in own[own["layer"] == shown[0]]["text"]]
        _name_axes(figure, num_experts, texts, len(shown))
    figure.update_xaxes(showgrid=False, zeroline=False)
    figure.update_yaxes(range=[num_experts - 0.5, -0.5], showgrid=False, zeroline=False)
    return figure


def weights(lines: pd.DataFrame, num_experts: int) -> np.ndarray:
    """Return (E, T) the weight of each expert for each line, NaN where it was not chosen."""
    grid_ET = np.full((num_experts, len(lines)), np.nan)
    for at, (ids, values) in enumerate(zip(lines["topk_ids"], lines["topk_weights"], strict=True)):
        for expert, weight in zip(ids, values, strict=True):
            if expert >= 0:
                grid_ET[expert, at] = weight
    return grid_ET


def _name_axes(figure: go.Figure, num_experts: int, texts: Sequence[str], last_row: int) -> None:
    """Write experts beside the maps, and the tokens below the last of them."""
    ticks = list(range(0, num_experts, max(1, num_experts // 8)))
    figure.update_yaxes(title="expert", tickvals=ticks)
    figure.update_xaxes(
        title="token, in the order of the text",
        tickvals=list(range(len(texts))),
        ticktext=texts,
        tickangle=-60,
        row=last_row,
        col=1,
    )
    figure.update_xaxes(range=[-0.5, len(texts) - 0.5], ticks="")


def _cells(
    lines: pd.DataFrame, num_experts: int, theme: str, colorbar: dict[str, Any] | None
) -> go.Heatmap:
    return heat(
        weights(lines, num_experts),
        theme=theme,
        words_YX=None,
        hover_YX=np.array([_hovers(line, num_experts) for line in records(lines)]).T,
        top=1.0,
        colorbar=colorbar,
    )


def _path(lines: pd.DataFrame, theme: str) -> go.Scatter:
    """Return the line through the best expert of each token; it breaks where there is none."""
    best = [next((expert for expert in ids if expert >= 0), None) for ids in lines["topk_ids"]]
    return go.Scatter(
        x=list(range(len(best))),
        y=best,
        mode="lines+markers",
        line={"color": themes.state_colour("watch", theme), "width": 1.2},
        marker={"size": 4},
        hoverinfo="skip",
        showlegend=False,
    )


def _hovers(line: Line, num_experts: int) -> list[str]:
    """Return (E,) what to show of one token on each expert, nothing where it was not chosen."""
    texts = [""] * num_experts
    for slot, (expert, weight) in enumerate(
        zip(line["topk_ids"], line["topk_weights"], strict=True)
    ):
        if expert >= 0:
            texts[expert] = (
                f"<b>{visible(line['text'])}</b>, position {line['position']}, "
                f"layer {line['layer']}<br>"
                f"expert {expert}: choice {slot + 1} of {len(line['topk_ids'])}, "
                f"weight {weight:.4f}<br>margin {line['margin']:.4f}<br>"
                f"step {line['step']}, table version {line['table_version']}"
            )
    return texts


def _finding(frame: pd.DataFrame, own: pd.DataFrame, request_id: int | None) -> str:
    if own.empty:
        return "no tokens"
    layer = own["layer"].iloc[0]
    whole = frame[(frame["request_id"] == request_id) & (frame["layer"] == layer)]
    drawn = int((own["layer"] == layer).sum())
    domain = themes.domain_name(str(own["domain"].iloc[0]))
    first = f"the first {drawn} of {len(whole)}" if drawn < len(whole) else f"{drawn}"
    return f"request {request_id} ({domain}), {first} tokens"
