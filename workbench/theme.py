"""How everything looks: light and dark, one scale of load, one table of states, names of domains.

The live page, the widgets and the figures take their colours and symbols from here and nowhere
else. Colour is never the only signal: a state has a symbol and a word, a domain a marker, a cell
of a map its number. Fonts are the reader's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.errors import ConfigError

THEMES = ("light", "dark")

FONT = "Inter, system-ui, 'Segoe UI', 'DejaVu Sans', 'Noto Sans CJK SC', sans-serif"

COLOURS: dict[str, dict[str, str]] = {
    "light": {
        "ground": "#f6f6f3",
        "surface": "#ffffff",
        "sunken": "#efefeb",
        "line": "#e3e3dd",
        "edge": "#d5d5ce",
        "text": "#17191c",
        "muted": "#5d6268",
        "accent": "#0b6e7d",
        "accent-soft": "#d9ecee",
        "on-accent": "#ffffff",
        "good": "#0b6e7d",
        "warn": "#9a5b00",
        "bad": "#b3261e",
        "rest": "#c9cfd0",
        "compute": "#8fa3a8",
        "routing": "#0b6e7d",
    },
    "dark": {
        "ground": "#0e1113",
        "surface": "#161a1d",
        "sunken": "#1e2327",
        "line": "#2a3035",
        "edge": "#3a4247",
        "text": "#eceff1",
        "muted": "#9aa4ab",
        "accent": "#56c2d0",
        "accent-soft": "#17363b",
        "on-accent": "#04171a",
        "good": "#56c2d0",
        "warn": "#e0a33e",
        "bad": "#f0857d",
        "rest": "#3a4247",
        "compute": "#5f7078",
        "routing": "#56c2d0",
    },
}
"""Roles to colours. Words keep a contrast of at least 4.5 to `ground` and `surface` in both."""

LOAD_STOPS: dict[str, tuple[str, ...]] = {
    "light": ("#f3f3f0", "#a9d4d8", "#429fac", "#116c7a", "#07353f"),
    "dark": ("#1b2024", "#1e525c", "#2f97a5", "#82d5de", "#e6faf9"),
}
"""Evenly spaced colours of a scale from nothing to much. Nothing is near the surface: idle is not
hot."""

LOAD_TOP = 4.0
"""The top of the load scale, in multiples of the fair share; more is drawn the same."""

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
    marker: str = ""
    """The name of the symbol in a plotly figure, for states that are drawn there."""


STATES: dict[str, State] = {
    # the routing overhead, by the marks of `views.MARKS`
    "within": State("good", "✓", "within 5 %", "circle"),
    "watch": State("warn", "▲", "above 5 %: watch it", "triangle-up"),
    "redesign": State("bad", "■", "above 10 %: rebuild the router", "square"),
    "unknown": State("muted", "–", "not known", "x-thin-open"),
    # kinds of stages
    "routing": State("routing", "◆", "routing", "diamond"),
    "compute": State("compute", "●", "computing", "circle"),
    "rest": State("rest", "○", "the rest", "circle-open"),
    # where numbers come from
    "measured": State("good", "●", "measured", "circle"),
    "recorded": State("muted", "▣", "recorded", "square"),
    "modelled": State("warn", "◇", "modelled", "diamond-open"),
    # a source of the live page
    "connecting": State("muted", "◌", "Connecting"),
    "loading": State("muted", "◌", "Loading the model"),
    "live": State("good", "●", "Live"),
    "idle": State("muted", "○", "Idle"),
    "paused": State("muted", "‖", "Traffic paused"),
    "replay": State("good", "▶", "Recording"),
    "held": State("muted", "‖", "Recording held"),
    "stalled": State("warn", "▲", "Stalled"),
    "ending": State("muted", "■", "Engine ending"),
    "gone": State("bad", "■", "Engine gone"),
    "refused": State("bad", "■", "Refused"),
    # a probe or a check of a drill
    "pass": State("good", "✓", "pass"),
    "fail": State("bad", "✗", "fail"),
    "could not run": State("warn", "?", "could not run"),
    # an expectation of a demo
    "waiting": State("muted", "◌", "measuring"),
    "holds": State("good", "✓", "as expected"),
    "late": State("warn", "▲", "not as expected"),
}
"""The one table of states for every view: key -> colour, symbol, word."""


def colours(theme: str) -> dict[str, str]:
    """Return the colours by role.

    Raises:
        ConfigError: a theme there is none of.
    """
    if theme not in THEMES:
        raise ConfigError(f"theme ({theme!r}) must be one of {', '.join(THEMES)}.")
    return COLOURS[theme]


def css_variables(theme: str) -> str:
    """Return the theme as CSS declarations: a variable for each role, `--load` for the scale."""
    declared = [f"--{role}: {colour};" for role, colour in colours(theme).items()]
    stops = ", ".join(LOAD_STOPS[theme])
    scale = f"--load: linear-gradient(90deg in oklab, {stops});"
    return " ".join([*declared, scale, f"color-scheme: {theme};"])


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


def domain_order(domains: Iterable[str]) -> list[str]:
    """Return the different domains: known ones in their order, then others by name."""
    known = list(DOMAIN_NAMES)
    return sorted(set(domains), key=lambda d: (known.index(d) if d in known else len(known), d))


def load_scale(theme: str) -> list[tuple[float, str]]:
    """Return the scale from nothing to much as stops from 0 to 1."""
    colours(theme)
    stops = LOAD_STOPS[theme]
    return [(at / (len(stops) - 1), colour) for at, colour in enumerate(stops)]
