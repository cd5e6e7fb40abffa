"""Colours keep their meaning and can be read."""

from __future__ import annotations

import numpy as np
import pytest

from dashboards import theme as themes
from dashboards.states import OVERHEAD_LIMITS, STATES, overhead_limit


def luminance(colour: str) -> float:
    rgb = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", themes.THEMES)
@pytest.mark.parametrize("role", ["text", "muted", "good", "warn", "bad", "accent"])
@pytest.mark.parametrize("ground", ["ground", "surface"])
def test_words_can_be_read_on_every_ground(theme, role, ground):
    colours = themes.COLOURS[theme]
    assert contrast(colours[role], colours[ground]) >= 4.5


@pytest.mark.parametrize("theme", themes.THEMES)
def test_numbers_in_cells_can_be_read_on_every_load(theme):
    palette = themes.load_palette(theme)
    assert min(contrast(themes.ink_on(colour), colour) for colour in palette) >= 4.5


@pytest.mark.parametrize("theme", themes.THEMES)
def test_the_load_scale_runs_evenly_from_the_first_stop_to_the_last(theme):
    palette, stops = themes.load_palette(theme, 257), themes.LOAD_STOPS[theme]
    assert [palette[64 * n] for n in range(5)] == list(stops)
    steps = np.diff([luminance(colour) for colour in palette])
    assert (steps <= 1e-3).all() or (steps >= -1e-3).all(), "brightness must not turn back"


@pytest.mark.parametrize("theme", themes.THEMES)
def test_an_idle_cell_is_nearer_to_the_surface_than_a_busy_one(theme):
    palette, surface = themes.load_palette(theme), themes.COLOURS[theme]["surface"]
    idle, fair = palette[0], palette[len(palette) // 4]
    assert contrast(idle, surface) < 1.25 < contrast(fair, surface) < contrast(palette[-1], surface)


def test_both_themes_name_the_same_roles():
    assert themes.COLOURS["light"].keys() == themes.COLOURS["dark"].keys()


def test_every_state_differs_by_word_and_not_by_colour_alone():
    assert len({look.word for look in STATES.values()}) == len(STATES)
    for look in STATES.values():
        assert look.symbol and look.tone in themes.COLOURS["light"]


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0.0, "within 5 %"),
        (0.05, "within 5 %"),
        (0.0501, "above 5 %: watch it"),
        (0.10, "above 5 %: watch it"),
        (0.11, "above 10 %: redesign"),
        (3.0, "above 10 %: redesign"),
    ],
)
def test_overhead_is_judged_by_the_5_and_10_per_cent_rule(share, words):
    assert overhead_limit(share).words == words
    assert len({limit.symbol for limit in OVERHEAD_LIMITS}) == 3
