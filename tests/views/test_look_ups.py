"""Look-ups are counted by the rows of their step, and steps without any are left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.views.handmade import Row, from_steps, start, step
from workbench import figures, views

ONE, TWO = [Row(0, 0, [(0, 1)])], [Row(0, 0, [(0, 1)]), Row(1, 0, [(2, 3)])]


def looking_up():
    begin = start()
    counts = ((ONE, 4, 0), (ONE, 2, 2), (TWO, 1, 3), (ONE, 0, 0), (TWO * 2, 0, 0))
    return from_steps(
        replace(step(begin, number, rows), look_ups_found=found, look_ups_missed=missed)
        for number, (rows, found, missed) in enumerate(counts)
    )


def test_steps_of_as_many_rows_are_added_up():
    table = views.look_ups(looking_up()).set_index("rows")
    assert table.loc[1, ["steps", "found", "missed", "share"]].tolist() == [2, 6, 2, 0.75]
    assert table.loc[2, ["steps", "found", "missed", "share"]].tolist() == [1, 1, 3, 0.25]
    assert table.index.tolist() == [1, 2]


def test_the_figure_says_how_many_and_where_most():
    figure = figures.look_ups(views.look_ups(looking_up()))
    said = figure.layout.title.subtitle.text
    assert "7 of 12 look-ups found, 58.3 %" in said and "steps of 1 rows (75.0 %)" in said
    found, missed = figure.data
    assert (list(found.y), list(missed.y)) == ([6, 1], [2, 3])


def test_they_survive_a_file(tmp_path):
    from workbench.trace import load, save

    again = views.look_ups(load(save(looking_up(), tmp_path / "t.moetrace")))
    assert again["found"].tolist() == [6, 1]
    assert views.look_ups(looking_up())["share"].tolist() == pytest.approx([0.75, 0.25])
