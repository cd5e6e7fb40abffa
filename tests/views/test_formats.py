"""Number formats by layer: counts are added up over steps, and none routed means no lines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.events import UnitEvent
from tests.views.handmade import Row, from_steps, start, step
from workbench import figures, views

ROWS = [Row(0, 4, [(0, 1), (2, 3)]), Row(0, 5, [(0, 1), (2, 3)])]


def unit(layer, **numbers):
    usual = {"units": 2, "int8_units": 1, "failed_units": 0, "rows": 4, "int8_rows": 2}
    usual |= {"rerun_rows": 0, "sampled_rows": 0, "switches": 1, "worst_error": 0.0}
    return UnitEvent(layer=layer, **usual | numbers)


def routed():
    begin = start(layers=(1, 3))
    plain = step(begin, 0, ROWS)
    codes = np.zeros(plain.topk_ids.shape, np.uint8)
    first = (unit(0), unit(1, sampled_rows=1, worst_error=0.25))
    second = (unit(0, failed_units=1, int8_rows=0, rerun_rows=2), unit(1))
    return from_steps(
        [
            replace(plain, formats=codes, units=first),
            replace(plain, step=1, formats=codes, units=second),
            replace(plain, step=2),
        ],
        begin=begin,
    )


def test_counts_add_up_over_steps_and_errors_are_of_sampled_rows_alone():
    frame = views.unit_formats(routed())
    assert frame["layer"].tolist() == [1, 3]
    assert frame[["units", "int8_units", "failed_units"]].to_numpy().tolist() == [
        [4, 2, 1],
        [4, 2, 0],
    ]
    assert frame[["rows", "int8_rows", "rerun_rows"]].to_numpy().tolist() == [[8, 2, 2], [8, 4, 0]]
    assert frame["int8_share"].tolist() == [0.25, 0.5]
    assert frame["switches_per_100_rows"].tolist() == [25, 25]
    assert np.isnan(frame["worst_error"][0]) and frame["worst_error"][1] == pytest.approx(0.25)


def test_the_figure_stacks_to_all_rows_and_names_the_worst_layer():
    figure = figures.unit_formats(views.unit_formats(routed()))
    bars = [trace for trace in figure.data if trace.type == "bar"]
    assert np.sum([bar.y for bar in bars], axis=0).tolist() == [100, 100]
    told = figure.layout.title.subtitle.text
    assert "6 of" not in told and "38 % of 16 rows in INT8, 2 run again" in told
    assert "in layer 3" in told


def test_formats_that_were_not_routed_give_no_lines():
    begin = start(layers=(1, 3))
    assert views.unit_formats(from_steps([step(begin, 0, ROWS)], begin=begin)).empty
