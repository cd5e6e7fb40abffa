"""All figures of one trace as one HTML page that needs nothing but a browser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from engine.config import one_of
from workbench import figures, views
from workbench import theme as themes
from workbench.trace.trace import Trace

NAMES = (
    *("expert_load", "domain_load", "load_balance", "token_experts", "jump_rate", "dropped_slots"),
    *("unit_formats", "draft_acceptance"),
    *("device_load", "device_traffic", "rank_times"),
    *("stage_totals", "stage_times", "overhead_total", "overhead_by_step", "overhead_by_batch"),
    "look_ups",
)
"""In the order of the page: experts, formats, drafts, devices, time."""

_CONFIG = {"displaylogo": False, "responsive": True}


def draw(
    trace: Trace, name: str, *, theme: str = "light", text: Callable[[int], str] | None = None
) -> go.Figure:
    """Draw the view `name` of a recorded trace; `text` says a token's, without it ids are shown.

    Raises:
        ConfigError: no such figure, or no such theme.
    """
    one_of("figure", name, NAMES)
    if name == "token_experts":
        tokens = views.token_experts(trace, text=text)
        return figures.token_experts(tokens, num_experts=trace.start.num_experts, theme=theme)
    frame = getattr(views, name)(trace, label="recorded")
    figure: go.Figure = getattr(figures, name)(frame, theme=theme)
    return figure


def is_empty(figure: go.Figure) -> bool:
    """Say whether a figure is a sheet without anything on it."""
    return not figure.data


def page(
    trace: Trace,
    names: Sequence[str] = (),
    *,
    title: str,
    theme: str = "light",
    text: Callable[[int], str] | None = None,
) -> str:
    """Return the page: the named figures, or all that the trace has something for.

    Args:
        trace: recorded.
        names: of `NAMES`; none are all, without those that stay empty.
        title: of the page, as plain text.
        theme: light or dark.
        text: token id to text; without it ids are shown.

    Raises:
        ConfigError: no such figure, or no such theme.
    """
    drawn = {name: draw(trace, name, theme=theme, text=text) for name in names or NAMES}
    shown = {name: one for name, one in drawn.items() if names or not is_empty(one)}
    left_out = [name for name in drawn if name not in shown]
    parts = [
        f"<section id={name}>"
        + one.to_html(full_html=False, include_plotlyjs=False, config=_CONFIG)
        + "</section>"
        for name, one in shown.items()
    ]
    if left_out:
        parts.append(f"<p>The trace holds nothing for: {', '.join(left_out)}.</p>")
    start = trace.start
    facts = (
        f"{start.model}, {start.dtype}, {trace.num_steps} steps, {trace.num_rows} rows, "
        f"{start.num_devices} devices"
    )
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{_style(theme)}</style>"
        f"<script>{get_plotlyjs()}</script></head>\n<body><main>"
        f"<h1>{escape(title)}</h1><p>{escape(facts)}</p>\n"
        + "\n".join(parts)
        + "</main></body></html>\n"
    )


def _style(theme: str) -> str:
    own = themes.colours(theme)
    return (
        f"body{{background:{own['ground']};color:{own['text']};font-family:{themes.FONT};"
        "margin:0}main{max-width:1100px;margin:0 auto;padding:24px 16px 48px}"
        "h1{font-size:22px;font-weight:600;margin:0 0 4px;overflow-wrap:anywhere}"
        f"p{{color:{own['muted']};margin:0 0 24px;overflow-wrap:anywhere}}"
        f"section{{background:{own['surface']};border:1px solid {own['line']};"
        "border-radius:10px;margin:0 0 20px;overflow:hidden}"
    )
