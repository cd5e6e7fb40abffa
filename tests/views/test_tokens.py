"""One line per token and layer: what was chosen, with the text."""

from __future__ import annotations

import math

import pytest

from tests.views.handmade import ONE_TOKEN, Row, start, trace
from workbench import views

ROWS = [
    Row(4, 1, [(2, 0), (1, 3)], step=2, token=11),
    Row(4, 0, [(0, 1), (3, -1)], step=0, token=10),
    Row(3, 0, [(1, 2), (2, 1)], step=1, token=10),
]
TRACE = trace(ROWS, begin=start(layers=(0, 6)), versions={2: 5}, labels={4: "zh"})


def test_lines_come_by_request_position_and_layer():
    table = views.token_experts(TRACE)
    order = table[["request_id", "position", "layer"]].values.tolist()
    assert order == [[3, 0, 0], [3, 0, 6], [4, 0, 0], [4, 0, 6], [4, 1, 0], [4, 1, 6]]
    assert table["topk_ids"].tolist() == [(1, 2), (2, 1), (0, 1), (3, -1), (2, 0), (1, 3)]
    assert table["domain"].tolist() == ["", "", "zh", "zh", "zh", "zh"]
    assert table["step"].tolist() == [1, 1, 0, 0, 2, 2]
    assert table["table_version"].tolist() == [1, 1, 1, 1, 5, 5]


def test_no_expert_stays_minus_one_with_no_weight():
    line = views.token_experts(TRACE).iloc[3]
    assert line["topk_ids"] == (3, -1) and line["topk_weights"] == (0.5, 0.0)


def test_physical_experts_stand_beside_the_logical_ones():
    replica = trace([Row(0, 0, [(2, 1)], phy=[(6, 1)])])
    line = views.token_experts(replica).iloc[0]
    assert (line["topk_ids"], line["phy_ids"]) == ((2, 1), (6, 1))


def test_text_comes_from_the_tokenizer_once_per_token_id():
    asked = []

    def text(token_id):
        asked.append(token_id)
        return f"<{token_id}>"

    table = views.token_experts(TRACE, text=text)
    assert table["text"].tolist() == ["<10>"] * 4 + ["<11>"] * 2
    assert asked == [10, 11]
    assert views.token_experts(TRACE)["text"].tolist()[-1] == "#11"


def test_one_request_can_be_asked_for_and_a_missing_one_is_empty():
    assert set(views.token_experts(TRACE, request_id=3)["request_id"]) == {3}
    assert views.token_experts(TRACE, request_id=99).empty


def test_a_token_run_again_is_shown_in_the_order_it_ran():
    rows = [Row(0, 0, [(0, 1)]), Row(0, 0, [(3, 2)], step=4, cause="recovery")]
    assert len(views.token_experts(trace(rows))) == 1
    both = views.token_experts(trace(rows), causes=None)
    assert both["cause"].tolist() == ["accepted", "recovery"]
    assert both["step"].tolist() == [0, 4]


def test_one_token_makes_one_line_per_layer():
    line = views.token_experts(ONE_TOKEN)
    assert len(line) == 1 and line.loc[0, "margin"] == pytest.approx(0.5)
    assert not math.isinf(line.loc[0, "margin"])
