"""How figures look: light and dark, colours for colour-blind readers too, one table of states.

Colour is never the only signal: a state has a symbol and a word, a domain a marker, a cell of a map
its number. Nothing here names a resource outside the figure; fonts are the reader's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from engine.errors import ConfigError

THEMES = ("light", "dark")

FONT = "Inter, system-ui, 'Segoe UI', 'DejaVu Sans', 'Noto Sans CJK SC', sans-serif"

COLOURS: dict[str, dict[str, str]] = {
    "light": {
        "surface": "#ffffff",
        "sunken": "#efefeb",
        "line": "#e3e3dd",
        "text": "#17191c",
        "muted": "#5d6268",
        "accent": "#0b6e7d",
        "good": "#0b6e7d",
        "warn": "#9a5b00",
        "bad": "#b3261e",
        "rest": "#c9cfd0",
        "compute": "#8fa3a8",
        "routing": "#0b6e7d",
    },
    "dark": {
        "surface": "#161a1d",
        "sunken": "#1e2327",
        "line": "#2a3035",
        "text": "#eceff1",
        "muted": "#9aa4ab",
        "accent": "#56c2d0",
        "good": "#56c2d0",
        "warn": "#e0a33e",
        "bad": "#f0857d",
        "rest": "#3a4247",
        "compute": "#5f7078",
        "routing": "#56c2d0",
    },
}
"""Roles to colours, the same as on the live page."""

LOAD_STOPS: dict[str, tuple[str, ...]] = {
    "light": ("#f3f3f0", "#a9d4d8", "#429fac", "#116c7a", "#07353f"),
    "dark": ("#1b2024", "#1e525c", "#2f97a5", "#82d5de", "#e6faf9"),
}
"""Evenly spaced colours of a scale from nothing to much. Nothing is close to the surface."""

LOAD_TOP = 4.0
"""The top of the load scale, in multiples of the uniform share; more is drawn the same."""

PALETTE: dict[str, tuple[str, ...]] = {
    "light": (
        "#033ad9",
        "#f43c0f",
        "#138e6c",
        "#d761b9",
        "#1298ff",
        "#824008",
        "#5c4376",
        "#372e23",
    ),
    "dark": (
        "#2480b3",
        "#ff8907",
        "#3ac177",
        "#fea2bc",
        "#83d1ff",
        "#f4d95d",
        "#a36dff",
        "#f4f4f4",
    ),
}
"""For domains and experts, one order in both themes.

Any two are at least 0.1 apart in OKLab, also as seen without one of the three kinds of cone, and
each has a contrast of at least 3 to the surface. Hues after M. Okabe and K. Ito, "Color Universal
Design" (2008); the simulation is that of G. Machado et al. (2009).
"""

MARKERS = (
    "circle",
    "square",
    "diamond",
    "triangle-up",
    "cross",
    "triangle-down",
    "star",
    "hexagon",
)
"""Beside `PALETTE`, entry by entry."""

DOMAIN_NAMES = {
    "de": "German",
    "en": "English",
    "es": "Spanish",
    "fr": "French",
    "zh": "Chinese",
    "py": "Python",
    "math": "Maths",
    "num": "Arithmetic",
}
"""The bundled corpus's domains in the order figures show them; other labels follow as they are."""


@dataclass(frozen=True, slots=True)
class State:
    """How one state is shown."""

    tone: str
    """A role of `COLOURS`."""
    symbol: str
    word: str
    marker: str
    """The name of the symbol in a plotly figure."""


STATES: dict[str, State] = {
    "within": State("good", "✓", "within 5 %", "circle"),
    "watch": State("warn", "▲", "above 5 %: watch it", "triangle-up"),
    "redesign": State("bad", "■", "above 10 %: rebuild the router", "square"),
    "unknown": State("muted", "–", "not known", "x-thin-open"),
    "routing": State("routing", "◆", "routing", "diamond"),
    "compute": State("compute", "●", "computing", "circle"),
    "rest": State("rest", "○", "the rest", "circle-open"),
    "measured": State("good", "●", "measured", "circle"),
    "recorded": State("muted", "▣", "recorded", "square"),
    "modelled": State("warn", "◇", "modelled", "diamond-open"),
}
"""The one table of states: overhead, kinds of stages, where numbers come from."""


def colours(theme: str) -> dict[str, str]:
    """Return the colours by role.

    Raises:
        ConfigError: a theme there is none of.
    """
    if theme not in THEMES:
        raise ConfigError(f"theme ({theme!r}) must be one of {', '.join(THEMES)}.")
    return COLOURS[theme]


def state_colour(state: str, theme: str) -> str:
    """Return the colour of an entry of `STATES`."""
    return colours(theme)[STATES[state].tone]


def category(index: int, theme: str) -> tuple[str, str]:
    """Return colour and marker of domain or expert number `index`; they repeat after 8."""
    colours(theme)
    palette = PALETTE[theme]
    # A second round keeps the colours and shifts the markers, so that 64 pairs are different.
    return palette[index % len(palette)], MARKERS[(index + index // len(palette)) % len(MARKERS)]


def domain_look(domain: str, theme: str) -> tuple[str, str]:
    """Return colour and marker of a domain: its own for a known one, muted for any other."""
    if domain in DOMAIN_NAMES:
        return category(list(DOMAIN_NAMES).index(domain), theme)
    return colours(theme)["muted"], "x"


def domain_name(domain: str) -> str:
    """Return a domain's name for people."""
    return DOMAIN_NAMES.get(domain, domain or "unlabelled")


def domain_order(domains: Any) -> list[str]:
    """Return the different domains: known ones in their order, then others by name."""
    known = list(DOMAIN_NAMES)
    return sorted(set(domains), key=lambda d: (known.index(d) if d in known else len(known), d))


def load_scale(theme: str) -> list[tuple[float, str]]:
    """Return the scale from nothing to much as a plotly colour scale."""
    colours(theme)
    stops = LOAD_STOPS[theme]
    return [(at / (len(stops) - 1), colour) for at, colour in enumerate(stops)]


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
