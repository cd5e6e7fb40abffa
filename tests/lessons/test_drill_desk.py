"""The desk of a drill in a notebook: what is typed, and what it says before it is started."""

from __future__ import annotations

import ipywidgets
import pytest

from engine.errors import ConfigError
from workbench import drills, lessons
from workbench.lessons.drill_desk import arguments_of


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("", {}),
        ("bonus=1.2, layer=0", {"bonus": 1.2, "layer": 0}),
        ("experts=[0, 7]", {"experts": [0, 7]}),
        ("option=num_blocks, value='1024'", {"option": "num_blocks", "value": "1024"}),
    ],
)
def test_arguments_are_read_as_people_type_them(text, arguments):
    assert arguments_of(text) == arguments


@pytest.mark.parametrize("text", ["1.2", "bonus=", "**{}", "a b"])
def test_other_forms_are_refused(text):
    with pytest.raises(ConfigError, match="bonus=1.2"):
        arguments_of(text)


def test_a_desk_that_was_not_started_says_so_also_behind_a_button():
    desk = lessons.drill("hot-expert")
    with pytest.raises(ConfigError, match=r"desk\.start"):
        desk.look()
    panel = desk.panel()
    look = panel.children[0].children[0]
    assert isinstance(look, ipywidgets.Button) and look.description == "Look"
    look.click()
    assert "desk.start()" in panel.children[-1].value


def test_the_reference_shows_the_levels_asked_for():
    easy = [one["id"] for one in drills.list() if one["level"] == 1]
    text = str(lessons.drill_reference([1]))
    assert text.count("\n") == len(easy) + 1 and all(f"`{name}`" in text for name in easy)


def test_a_surprise_is_of_its_level_and_the_same_for_a_seed():
    for level in (1, 2, 3):
        found = drills.surprise(level, seed=3)
        assert drills.find(found).level == level and found == drills.surprise(level, seed=3)
    with pytest.raises(ConfigError, match="1, 2 or 3"):
        drills.surprise(4)
