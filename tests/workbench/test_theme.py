"""Colours hold their contrast, stay apart for colour-blind readers, and never speak alone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from workbench import theme as themes

# G. Machado, M. Oliveira, L. Fernandes (2009), severity 1, on linear RGB.
EYES = {
    "all cones": np.eye(3),
    "no long": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "no medium": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "no short": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
TO_LMS = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
TO_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


def linear(colour: str) -> np.ndarray:
    rgb = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """The ratio of WCAG 2."""
    low, high = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (one, other))
    return (high + 0.05) / (low + 0.05)


def closest(palette: tuple[str, ...], eye: object) -> float:
    seen = [TO_LAB @ np.cbrt(TO_LMS @ np.clip(np.array(eye) @ linear(c), 0, 1)) for c in palette]
    return min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2))


@pytest.mark.parametrize("theme", themes.THEMES)
@pytest.mark.parametrize("eye", EYES)
def test_any_two_categories_can_be_told_apart(theme, eye):
    assert closest(themes.PALETTE[theme], EYES[eye]) >= 0.1


def test_a_palette_of_red_and_green_is_caught():
    assert closest(("#b0502e", "#7a6a20"), EYES["no medium"]) < 0.1


@pytest.mark.parametrize("theme", themes.THEMES)
def test_words_and_marks_stand_out_from_the_surface(theme):
    own = themes.COLOURS[theme]
    for role in ("text", "muted", "accent", "good", "warn", "bad"):
        for ground in ("ground", "surface"):
            assert contrast(own[role], own[ground]) >= 4.5, (role, ground)
    assert contrast(own["on-accent"], own["accent"]) >= 4.5
    assert contrast(own["text"], own["accent-soft"]) >= 7
    for colour in themes.PALETTE[theme]:
        assert contrast(colour, own["surface"]) >= 3, colour


@pytest.mark.parametrize("theme", themes.THEMES)
def test_the_load_scale_runs_one_way_and_begins_at_the_surface(theme):
    light = [float(linear(stop) @ [0.2126, 0.7152, 0.0722]) for stop in themes.LOAD_STOPS[theme]]
    assert light == sorted(light, reverse=theme == "light")
    assert contrast(themes.LOAD_STOPS[theme][0], themes.COLOURS[theme]["surface"]) < 1.2


def test_every_state_has_a_symbol_a_word_and_a_role_of_its_own():
    looks = themes.STATES.values()
    assert len({look.word for look in looks}) == len(themes.STATES)
    for states in (
        ("within", "watch", "redesign", "unknown"),
        ("measured", "recorded", "modelled"),
        ("routing", "compute", "rest"),
    ):
        shown = [themes.STATES[state] for state in states]
        assert len({look.symbol for look in shown}) == len({look.marker for look in shown})
        assert len({look.symbol for look in shown}) == len(states)
    for states in (("pass", "fail", "could not run"), ("waiting", "holds", "late")):
        assert len({themes.STATES[state].symbol for state in states}) == len(states)
    assert all(look.symbol and look.tone in themes.COLOURS["light"] for look in looks)
    assert set(themes.COLOURS["light"]) == set(themes.COLOURS["dark"])


def test_categories_are_different_for_64_and_domains_keep_their_own():
    assert len({themes.category(index, "dark") for index in range(64)}) == 64
    looks = {themes.domain_look(domain, "light") for domain in themes.DOMAIN_NAMES}
    assert len(looks) == len({marker for _, marker in looks}) == 8
    assert themes.domain_look("own", "light") == (themes.COLOURS["light"]["muted"], "x")


def test_known_domains_come_first_and_others_by_name():
    assert themes.domain_order(["b", "num", "", "de", "a", "de"]) == ["de", "num", "", "a", "b"]
    assert [themes.domain_name(d) for d in ("zh", "", "own")] == ["Chinese", "unlabelled", "own"]


def test_a_style_sheet_has_every_role_and_the_scale():
    for theme in themes.THEMES:
        css = themes.css_variables(theme)
        assert all(f"--{role}: {colour};" in css for role, colour in themes.COLOURS[theme].items())
        assert ", ".join(themes.LOAD_STOPS[theme]) in css and f"color-scheme: {theme}" in css
