"""The widgets' browser side as text: one ES module and one style sheet for each widget.

What both share stands in `host.js` and `host.css` and is joined in front, as are the colours of
`workbench.theme`, so that a host gets one self-contained module and never asks for a second file.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from workbench.theme import DOMAIN_NAMES, THEMES, css_variables
from workbench.widgets.frames import TOP
from workbench.widgets.palette import ink_on, load_palette

_HERE = Path(__file__).parent


@cache
def script(widget: str) -> str:
    """Return the ES module of `live_map` or `token_stepper`."""
    first = _palettes() if widget == "live_map" else _domains()
    return _joined(first, "host.js", f"{widget}.js")


@cache
def styles(widget: str) -> str:
    """Return the style sheet of `live_map` or `token_stepper`."""
    return _joined(_colours(), "host.css", f"{widget}.css")


def _palettes() -> str:
    """Return the colour of every cell from 0 to `TOP`, and what is written with on it."""
    colours = {theme: load_palette(theme, TOP + 1) for theme in THEMES}
    inks = {theme: [ink_on(colour) for colour in colours[theme]] for theme in THEMES}
    return f"const PALETTES = {json.dumps(colours)};\nconst INKS = {json.dumps(inks)};"


def _domains() -> str:
    """Return what the domains are called on every screen."""
    return f"const DOMAINS = {json.dumps(DOMAIN_NAMES)};"


def _colours() -> str:
    """Return the colours by role; a widget whose theme is not known yet is light."""
    light, dark = map(css_variables, THEMES)
    return f'.trw {{ {light} }}\n.trw[data-theme="dark"] {{ {dark} }}'


def _joined(first: str, *names: str) -> str:
    return "\n".join([first, *((_HERE / name).read_text(encoding="utf-8") for name in names)])
