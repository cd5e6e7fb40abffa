"""The colours of cells: even from end to end, and each number on them can be read."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from workbench.theme import COLOURS, LOAD_STOPS, THEMES
from workbench.widgets.frames import TOP
from workbench.widgets.module import script
from workbench.widgets.palette import INKS, ink_on, load_palette


def luminance(colour: str) -> float:
    rgb = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def in_browser(name: str) -> dict[str, list[str]]:
    """Return what the live map's module carries."""
    found = re.search(rf"^const {name} = (.*);$", script("live_map"), re.MULTILINE)
    assert found is not None
    return json.loads(found[1])


@pytest.mark.parametrize("theme", THEMES)
def test_the_browser_has_a_colour_for_every_cell_and_what_is_written_on_it_can_be_read(theme):
    palette, inks = in_browser("PALETTES")[theme], in_browser("INKS")[theme]
    assert palette == list(load_palette(theme, TOP + 1)) and len(inks) == len(palette) == TOP + 1
    pairs = list(zip(palette, inks, strict=True))
    assert min(contrast(ink, colour) for colour, ink in pairs) >= 4.5
    swapped = [contrast(next(i for i in INKS if i != ink), colour) for colour, ink in pairs]
    assert min(swapped) < 4.5, "the other ink could not be read everywhere"


@pytest.mark.parametrize("theme", THEMES)
def test_the_scale_runs_evenly_from_the_first_stop_to_the_last(theme):
    palette, stops = load_palette(theme, 257), LOAD_STOPS[theme]
    assert [palette[64 * n] for n in range(5)] == list(stops)
    steps = np.diff([luminance(colour) for colour in palette])
    assert (steps <= 1e-3).all() or (steps >= -1e-3).all(), "brightness must not turn back"


@pytest.mark.parametrize("theme", THEMES)
def test_an_idle_cell_is_nearer_to_the_surface_than_a_busy_one(theme):
    palette, surface = load_palette(theme, TOP + 1), COLOURS[theme]["surface"]
    idle, fair = palette[0], palette[len(palette) // 4]
    assert contrast(idle, surface) < 1.25 < contrast(fair, surface) < contrast(palette[-1], surface)


def test_black_on_white_and_white_on_black():
    assert (ink_on("#ffffff"), ink_on("#000000")) == INKS
