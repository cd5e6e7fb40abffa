"""The load scale as one colour a cell: mixed here once, so that the browser only looks them up.

Colours are mixed in OKLab, where equal steps look equal. Source: B. Ottosson, "A perceptual color
space for image processing" (2020). Black or white on top goes by the contrast of WCAG 2.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from workbench.theme import load_scale

Triple = npt.NDArray[np.float64]
INKS = ("#020304", "#ffffff")
"""What is written with on a light and on a dark colour."""

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


@cache
def load_palette(theme: str, size: int) -> tuple[str, ...]:
    """Return the colours of `size` values from nothing to much, evenly spaced."""
    stops = np.array([_oklab(_rgb(colour)) for _, colour in load_scale(theme)])
    at = np.linspace(0, len(stops) - 1, size)
    mixed = np.stack([np.interp(at, range(len(stops)), stops[:, c]) for c in range(3)], axis=1)
    return tuple(_hex(_srgb(lab)) for lab in mixed)


def ink_on(colour: str) -> str:
    """Return the one of `INKS` that has the higher contrast to `colour`."""
    luminance = float(_linear(_rgb(colour)) @ _LUMINANCE)
    return INKS[0] if (luminance + 0.05) ** 2 > 0.05 * 1.05 else INKS[1]


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
