"""Balance figures against their formulas, written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ConfigError
from tests.views.handmade import Row, start, trace
from workbench import views
from workbench.report import balance as report_balance
from workbench.trace import Recorder, synthetic

UNEVEN = [Row(0, 0, [(0, 1)]), Row(0, 1, [(0, -1)]), Row(0, 2, [(0, -1)])]
"""Counts 3 1 0 0."""


def values(table):
    return dict(zip(table["measure"], table["value"], strict=True))


def test_every_figure_is_the_one_computed_by_hand():
    found = values(views.load_balance(trace(UNEVEN)))
    assert found["max_over_mean"] == 3
    assert found["coefficient_of_variation"] == pytest.approx(math.sqrt((4 + 0 + 1 + 1) / 4))
    # Ordered pairs: 2 (|3-1| + |3-0| + |3-0| + |1-0| + |1-0| + 0) = 20; 20 / (2 x 16 x 1).
    assert found["gini"] == pytest.approx(20 / 32)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4)
    assert found["entropy"] == pytest.approx(entropy)
    assert found["idle_share"] == 0.5


def test_every_value_stands_beside_its_formula():
    table = views.load_balance(trace(UNEVEN))
    assert dict(zip(table["measure"], table["formula"], strict=True)) == views.BALANCE_FORMULAS
    assert set(table["units"]) == {4}


@pytest.mark.parametrize("counts", [[5], [2, 2], [7] * 9])
def test_an_even_load_is_even_by_every_figure(counts):
    assert views.measures(counts) == pytest.approx(
        {
            "max_over_mean": 1,
            "coefficient_of_variation": 0,
            "gini": 0,
            "entropy": 1,
            "idle_share": 0,
        }
    )


def test_all_on_one_is_the_other_end():
    found = views.measures([0, 0, 0, 9])
    assert found["max_over_mean"] == 4 and found["gini"] == pytest.approx(1 - 1 / 4)
    assert found["entropy"] == 0 and found["idle_share"] == 0.75


def test_no_rows_have_no_balance():
    assert all(math.isnan(value) for value in views.measures([0, 0, 0]).values())
    assert views.load_balance(trace([]))["value"].isna().all()


def test_devices_can_be_even_when_experts_are_not():
    rows = [Row(0, 0, [(0, 2)]), Row(0, 1, [(0, 2)])]
    assert values(views.load_balance(trace(rows)))["max_over_mean"] == 2
    by_device = views.load_balance(trace(rows), per="device")
    assert values(by_device)["max_over_mean"] == 1 and set(by_device["units"]) == {2}


def test_a_replica_evens_the_devices_and_leaves_the_experts_as_they_are():
    begin = start(rank_of_phy=(0, 0, 1, 1, 1))
    here, spread = [(0, 1)], [(4, 1)]
    before = trace([Row(0, 0, here), Row(0, 1, here)], begin=begin)
    after = trace([Row(0, 0, here), Row(0, 1, here, phy=spread)], begin=begin)

    def peak(made, per):
        return values(views.load_balance(made, per=per))["max_over_mean"]

    assert peak(before, "device") == 2 and peak(after, "device") == 1.5
    assert peak(before, "expert") == peak(after, "expert") == 2


def test_a_unit_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=r"'rack'.*'expert' or 'device'"):
        views.load_balance(trace([]), per="rack")


def test_the_view_and_the_report_of_a_generation_agree():
    recorder = Recorder()
    for event in synthetic.run(synthetic.start_event(), steps=9, rows=4):
        recorder.emit(event)
    table = views.load_balance(recorder.trace())
    peak = table[table["measure"] == "max_over_mean"]["value"]
    assert peak.mean() == pytest.approx(report_balance(recorder.trace().expert_counts()))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12).filter(any))
def test_the_figures_agree_with_their_formulas_taken_literally(counts):
    n, found = np.array(counts, float), views.measures(counts)
    differences = sum(abs(a - b) for a in n for b in n)
    assert found["gini"] == pytest.approx(differences / (2 * len(n) ** 2 * n.mean()), abs=1e-12)
    assert found["coefficient_of_variation"] == pytest.approx(
        math.sqrt(((n - n.mean()) ** 2).mean()) / n.mean(), abs=1e-12
    )
    assert -1e-12 <= found["gini"] <= 1 - 1 / len(n) + 1e-12
    assert -1e-12 <= found["entropy"] <= 1 + 1e-12
    assert 1 - 1e-12 <= found["max_over_mean"] <= len(n) + 1e-12
    assert views.measures(counts[::-1]) == pytest.approx(found)
