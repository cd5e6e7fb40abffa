"""Each figure draws the numbers of its table, at their places."""

from __future__ import annotations

import math

import numpy as np
import pytest

from engine.errors import ConfigError
from tests.figures.test_every_figure import recorded, subtitle
from tests.views.handmade import Row, from_steps, start, step, trace
from tests.views.test_jumps import SEQUENCE
from tests.views.test_load import ROWS, TWO_LAYERS
from tests.views.test_time import BATCHES, TWO
from tests.views.test_traffic import CHANGED
from tests.views.test_traffic import ROWS as TRAFFIC_ROWS
from workbench import figures, views
from workbench.figures import canvas

LARGE = recorded(layers=9, experts=96, top_k=4)


def maps(figure):
    return [drawn for drawn in figure.data if drawn.type == "heatmap"]


def test_the_load_map_has_a_line_a_layer_and_a_word_a_cell():
    figure = figures.expert_load(views.expert_load(trace(ROWS, begin=TWO_LAYERS)))
    (cells,) = maps(figure)
    assert cells.z.tolist() == [[3, 1, 0, 0], [0, 1, 1, 2]]
    assert cells.text.tolist()[0] == ["3.0×", "1.0×", "idle", "idle"]
    assert cells.customdata[1, 3].tolist() == [5, 3, 2, 0.5, 2]
    assert list(figure.layout.yaxis.ticktext) == ["2", "5"]
    assert "expert 0 of layer 2 with 3.00 × its fair share" in subtitle(figure)


def test_a_large_map_is_drawn_without_words_but_with_every_number():
    figure = figures.expert_load(views.expert_load(LARGE))
    (cells,) = maps(figure)
    assert cells.z.shape == (9, 96) and cells.customdata.shape == (9, 96, 5)
    assert cells.text is None and cells.texttemplate is None


def test_domains_stand_in_their_order_with_their_names():
    rows = [Row(0, 0, [(0, 1)]), Row(1, 0, [(2, 3)]), Row(2, 0, [(0, 3)])]
    table = views.domain_load(trace(rows, labels={0: "py", 1: "de", 2: "own"}))
    figure = figures.domain_load(table)
    assert list(figure.layout.yaxis.ticktext) == ["German", "Python", "own"]
    assert maps(figure)[0].z.tolist() == [[0, 0, 2, 2], [2, 2, 0, 0], [2, 0, 0, 2]]


def test_many_layers_are_thinned_evenly_unless_named():
    table = views.domain_load(LARGE)
    assert len(maps(figures.domain_load(table))) == canvas.MAX_PANELS
    named = figures.domain_load(table, layers=[8, 2])
    assert [note.text for note in named.layout.annotations] == ["layer 8", "layer 2"]


TOKENS = trace(
    [Row(0, 0, [(2, 0)], token=5), Row(0, 1, [(1, -1)], token=6), Row(4, 0, [(3, 0)], token=7)]
)


def test_the_token_map_shows_weights_where_an_expert_was_chosen_and_nothing_elsewhere():
    table = views.token_experts(TOKENS, text=lambda token: f" <{token}>\n")
    figure = figures.token_experts(table, num_experts=4)
    cells, path = figure.data
    expected = [[0.5, math.nan], [math.nan, 0.5], [0.5, math.nan], [math.nan, math.nan]]
    np.testing.assert_array_equal(cells.z, expected)
    assert list(path.y) == [2, 1]
    assert list(figure.layout.xaxis.ticktext) == ["␣&lt;5>⏎", "␣&lt;6>⏎"]
    assert "choice 1 of 2, weight 0.5000" in cells.hovertext[2, 0]
    assert cells.hovertext[3, 0] == ""


def test_another_request_and_fewer_tokens_can_be_asked_for():
    table = views.token_experts(TOKENS)
    other = figures.token_experts(table, num_experts=4, request_id=4)
    assert maps(other)[0].z.shape == (4, 1) and "request 4" in subtitle(other)
    cut = figures.token_experts(table, num_experts=4, max_tokens=1)
    assert maps(cut)[0].z.shape == (4, 1) and "the first 1 of 2 tokens" in subtitle(cut)


def test_traffic_is_drawn_from_home_down_to_device_across_with_the_home_marked():
    figure = figures.device_traffic(views.device_traffic(trace(TRAFFIC_ROWS), hidden_size=192))
    (cells,) = maps(figure)
    assert cells.z.tolist() == [[3, 1], [2, 0]]
    assert cells.text.tolist() == [["⌂ 3", "1"], ["2", "⌂ 0"]]
    assert len(figure.layout.shapes) == 2
    assert "50.0 % of 6 slots leave home, 2.25 KiB one way (modelled)" in subtitle(figure)


def test_bytes_carry_their_own_label_and_unknown_tables_a_question_mark():
    table = views.device_traffic(trace(CHANGED, versions={1: 2}), hidden_size=192)
    figure = figures.device_traffic(table, quantity="bytes")
    assert "◇ modelled" in subtitle(figure) and "recorded" not in subtitle(figure)
    assert list(figure.layout.xaxis.ticktext) == ["0", "1", "?"]
    assert "2 slots under a table that is not known (?)" in subtitle(figure)
    with pytest.raises(ConfigError, match=r"'bits'.*rows, tokens, bytes"):
        figures.device_traffic(table, quantity="bits")


def test_jump_rates_stand_beside_the_expected_ones():
    figure = figures.jump_rate(views.jump_rate(trace(SEQUENCE)))
    by_name = {(d.name, d.xaxis): list(d.y) for d in figure.data if d.name}
    assert by_name["neighbours", "x2"] == pytest.approx([100 / 3])
    expected = "expected of unrelated tokens with the same load"
    assert by_name[expected, "x2"] == pytest.approx([200 / 3])
    assert by_name["neighbours", "x"] == [100]


def test_domains_have_a_line_each_that_differs_in_colour_and_marker():
    rows = [Row(r, p, [(p, 3)]) for r in (0, 1) for p in range(3)]
    table = views.jump_rate(trace(rows, labels={0: "de", 1: "py"}), by_domain=True)
    figure = figures.jump_rate(table)
    lines = [line for line in figure.data if line.showlegend]
    assert [line.name for line in lines] == ["German", "Python"]
    assert lines[0].marker.symbol != lines[1].marker.symbol
    assert lines[0].marker.color != lines[1].marker.color


def test_stages_are_bars_in_the_order_of_a_step_with_a_symbol_for_their_kind():
    figure = figures.stage_totals(views.stage_totals(TWO))
    shares = {stage: x for bar in figure.data for stage, x in zip(bar.y, bar.x, strict=True)}
    assert shares["experts"] == pytest.approx(55) and sum(shares.values()) == pytest.approx(100)
    stages = list(figure.layout.yaxis.ticktext)
    assert stages.index("attention  ●") < stages.index("select  ◆") < stages.index("experts  ●")
    assert {bar.name for bar in figure.data} == {"◆ routing", "● computing", "○ the rest"}


def test_steps_are_stacked_to_their_whole_time_and_only_the_last_are_drawn():
    figure = figures.stage_times(views.stage_times(TWO))
    totals = np.sum([bar.y for bar in figure.data], axis=0)
    assert totals.tolist() == pytest.approx([1.0, 9.0])
    last = figures.stage_times(views.stage_times(TWO), max_steps=1)
    assert list(last.data[0].x) == [1] and "the last 1 of 2 steps" in subtitle(last)


def test_steps_are_marked_by_state_and_the_marks_are_drawn():
    figure = figures.overhead_by_step(views.overhead_by_step(TWO))
    by_name = {drawn.name: drawn for drawn in figure.data}
    red = by_name["■ above 10 %: rebuild the router: 1 steps"]
    assert list(red.x) == [0] and red.y == pytest.approx([20]) and red.marker.symbol == "square"
    assert by_name["all steps together: 4.0 %"].y == pytest.approx([4, 4])
    assert [line.y0 for line in figure.layout.shapes] == [5, 10]
    assert "0.4 ms of 10 ms = 4.0 % ✓ within 5 %" in subtitle(figure)


def test_a_step_far_above_the_others_is_drawn_at_the_edge_and_counted():
    steps = [
        step(start(), n, [Row(0, n, [(0, 1)])], stage_ms={"select": 9.0 if n == 50 else 0.2})
        for n in range(100)
    ]
    figure = figures.overhead_by_step(views.overhead_by_step(from_steps(steps)))
    assert figure.layout.yaxis.title.text == "share, 1 above the edge"
    outlier = next(drawn for drawn in figure.data if 50 in (drawn.x if drawn.name else ()))
    assert max(max(drawn.y) for drawn in figure.data) <= figure.layout.yaxis.range[1] < 90
    assert "90.00 %" in str(outlier.customdata) + str(outlier.hovertemplate)


def test_the_total_is_one_bar_against_two_marks():
    figure = figures.overhead_total(views.overhead_total(TWO))
    assert figure.data[0].x == pytest.approx([4.0])
    assert [line.x0 for line in figure.layout.shapes] == [5, 10]
    assert "0.4 ms of 10 ms in 2 steps, 0 of them above 5 % and 1 above 10 %" in subtitle(figure)


def test_batches_are_named_as_people_write_them_and_split_at_eight():
    figure = figures.overhead_by_batch(views.overhead_by_batch(BATCHES))
    per_row = figure.data[-1]
    assert list(per_row.x) == ["1", "2–3", "4–7", "8–15"]
    assert per_row.y == pytest.approx([400, 48, 100 / 7, 400 / 23])
    # (0.4 + 0.24 + 0.1) / (2 + 2 + 4 + 5) below, (0.1 + 0.3) / 20 from eight.
    assert "below 8 rows 5.7 %, from 8 rows 2.0 %" in subtitle(figure)


def test_every_balance_panel_carries_its_formula_and_its_even_line():
    figure = figures.load_balance(views.load_balance(trace(ROWS, begin=TWO_LAYERS)))
    heads = [note.text for note in figure.layout.annotations]
    for formula in views.BALANCE_FORMULAS.values():
        assert any(formula.split("; ")[0] in head for head in heads)
    assert [line.y0 for line in figure.layout.shapes] == [1, 0, 0, 1, 0]
    assert list(figure.data[1].y) == [3, 2]


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (canvas.milliseconds, 0.0431, "43.1 µs"),
        (canvas.milliseconds, 12.345, "12.3 ms"),
        (canvas.milliseconds, 1234.0, "1\u202f234 ms"),
        (canvas.milliseconds, 19_733.0, "19.7 s"),
        (canvas.milliseconds, math.nan, "–"),
        (canvas.size, 1023, "1023 B"),
        (canvas.size, 2048, "2 KiB"),
        (canvas.size, 3 << 30, "3 GiB"),
        (canvas.size, math.nan, "–"),
        (canvas.percent, 0.0491, "4.9 %"),
        (canvas.percent, math.nan, "–"),
        (canvas.visible, "", "∅"),
        (canvas.visible, " a<b>\t", "␣a&lt;b>⇥"),
    ],
)
def test_numbers_and_tokens_are_written_for_people(write, value, text):
    assert write(value) == text
