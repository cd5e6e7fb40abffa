"""Dropped slots are counted by layer and expert, and only those without a physical expert."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.views.handmade import Row, from_steps, start, step
from workbench import figures, views


def dropping():
    made = step(start(), 0, [Row(0, 0, [(0, 1)]), Row(0, 1, [(0, 1)]), Row(1, 0, [(0, 2)])])
    phy_ids = made.phy_ids.copy()
    phy_ids[2, 0, 0] = phy_ids[1, 0, 1] = -1
    return from_steps([replace(made, phy_ids=phy_ids)])


def test_slots_are_counted_by_expert_and_those_without_a_place_are_dropped():
    table = views.dropped_slots(dropping())
    first = table[table["layer"] == table["layer"].min()].set_index("expert")
    assert first.loc[[0, 1, 2], "slots"].tolist() == [3, 2, 1]
    assert first.loc[[0, 1, 2], "dropped"].tolist() == [1, 1, 0]
    assert first.loc[0, "share"] == pytest.approx(1 / 3) and np.isnan(first.loc[3, "share"])
    others = table[table["layer"] > table["layer"].min()]
    assert not others["dropped"].any()


def test_the_figure_says_how_many_and_of_whom():
    figure = figures.dropped_slots(views.dropped_slots(dropping()))
    said = figure.layout.title.subtitle.text
    assert "2 of" in said and "expert 0 of layer 0: 1" in said
    run, dropped = figure.data
    assert sum(dropped.y) == 2 and sum(run.y) > 0
