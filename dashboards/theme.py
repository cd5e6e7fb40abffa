"""Colours: one set for light, one for dark, one scale for load that means the same on every screen.

The page gets them as CSS variables, what is drawn cell by cell as a palette. The scale is
interpolated in OKLab, where equal steps look equal. Source: B. Ottosson, "A perceptual color space
for image processing" (2020).
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

THEMES = ("light", "dark")

COLOURS: dict[str, dict[str, str]] = {
    "light": {
        "ground": "#f6f6f3",
        "surface": "#ffffff",
        "sunken": "#efefeb",
        "line": "#e3e3dd",
        "text": "#17191c",
        "muted": "#5d6268",
        "accent": "#0b6e7d",
        "accent-soft": "#d9ecee",
        "good": "#0b6e7d",
        "warn": "#9a5b00",
        "bad": "#b3261e",
    },
    "dark": {
        "ground": "#0e1113",
        "surface": "#161a1d",
        "sunken": "#1e2327",
        "line": "#2a3035",
        "text": "#eceff1",
        "muted": "#9aa4ab",
        "accent": "#56c2d0",
        "accent-soft": "#17363b",
        "good": "#56c2d0",
        "warn": "#e0a33e",
        "bad": "#f0857d",
    },
}
"""Roles to colours. `muted` on `ground` keeps a contrast of at least 4.5 in both."""

LOAD_STOPS: dict[str, tuple[str, ...]] = {
    "light": ("#f3f3f0", "#a9d4d8", "#429fac", "#116c7a", "#07353f"),
    "dark": ("#1b2024", "#1e525c", "#2f97a5", "#82d5de", "#e6faf9"),
}
"""Colours of 0, 1, 2, 3 and 4 times the fair share. Zero is near the surface: idle is not hot."""

LOAD_TOP = 4.0
"""The top of the load scale, in multiples of the fair share; more is drawn the same."""

STAGE_COLOURS: dict[str, tuple[str, str, str]] = {
    "light": ("#c9cfd0", "#8fa3a8", "#0b6e7d"),
    "dark": ("#3a4247", "#5f7078", "#56c2d0"),
}
"""Colours of a stage that is neither, one that computes, one that routes."""


def css_variables(theme: str) -> str:
    """Return the theme as CSS declarations."""
    stops = ", ".join(LOAD_STOPS[theme])
    rest, compute, routing = STAGE_COLOURS[theme]
    declared = [f"--{role}: {colour};" for role, colour in COLOURS[theme].items()]
    declared += [
        f"--load: linear-gradient(90deg in oklab, {stops});",
        f"--stage-rest: {rest};",
        f"--stage-compute: {compute};",
        f"--stage-routing: {routing};",
        f"color-scheme: {theme};",
    ]
    return " ".join(declared)


@cache
def load_palette(theme: str, size: int = 256) -> tuple[str, ...]:
    """Return the colours of loads from 0 to `LOAD_TOP`, evenly spaced."""
    stops = np.array([_oklab(_rgb(colour)) for colour in LOAD_STOPS[theme]])
    at = np.linspace(0, len(stops) - 1, size)
    mixed = np.stack([np.interp(at, range(len(stops)), stops[:, c]) for c in range(3)], axis=1)
    return tuple(_hex(_srgb(lab)) for lab in mixed)


def ink_on(colour: str) -> str:
    """Return black or white, whichever has the higher contrast to `colour` (WCAG 2)."""
    luminance = float(_linear(_rgb(colour)) @ _LUMINANCE)
    return "#020304" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "#ffffff"


Triple = npt.NDArray[np.float64]

_TO_LMS = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
_TO_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


_LUMINANCE = np.array([0.2126, 0.7152, 0.0722])


def _rgb(colour: str) -> Triple:
    return np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])


def _hex(rgb: Triple) -> str:
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in rgb.clip(0, 1).tolist())


def _oklab(rgb: Triple) -> Triple:
    return np.asarray(_TO_LAB @ np.cbrt(_TO_LMS @ _linear(rgb)))


def _linear(rgb: Triple) -> Triple:
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def _srgb(lab: Triple) -> Triple:
    linear = np.linalg.solve(_TO_LMS, np.linalg.solve(_TO_LAB, lab) ** 3).clip(0, 1)
    return np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
