"""Alerts: what raises one, what clears it, and that a value at the edge does not flicker."""

from __future__ import annotations

import numpy as np
import pytest

from engine.checkpoint.load import read_config
from engine.serve.alerts import EXPERT_IDLE, MEAN_LATENCY, RULES, Alerts, readings, with_thresholds
from engine.serve.health import Health
from engine.serve.tally import PAUSE_S, WINDOW_S, ServeTally, balance
from tests.serve.conftest import MODEL


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


QUIET = {
    "mean_latency_s": None,
    "expert_idle_s": 0.0,
    "overhead_share": None,
    "rank_excess_s": 0.0,
    "ranks_silent": 0.0,
    "rank_table_lag": 0.0,
    "num_waiting": 0.0,
}


@pytest.fixture
def alerts():
    return Alerts(clock=Clock())


def after(alerts, seconds, **values):
    alerts._clock.now += seconds
    alerts.check(QUIET | values)
    return alerts.active


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_is_raised_kept_and_cleared(rule, alerts):
    assert rule.clear_below <= rule.raise_above
    high, low = rule.raise_above * 1.5 + 1e-3, rule.clear_below * 0.5
    between = (rule.raise_above + rule.clear_below) / 2
    after(alerts, 0, **{rule.reading: high})
    if rule.for_s:
        assert rule.name not in after(alerts, 0.9 * rule.for_s, **{rule.reading: high})
    assert rule.name in after(alerts, rule.for_s, **{rule.reading: high})
    if between > rule.clear_below:
        assert rule.name in after(alerts, 1000, **{rule.reading: between})
    after(alerts, 1, **{rule.reading: low})
    assert rule.name not in after(alerts, rule.for_s, **{rule.reading: low})
    if between < rule.raise_above:
        assert rule.name not in after(alerts, 1000, **{rule.reading: between})


def test_a_short_peak_raises_nothing_and_no_reading_changes_nothing(alerts):
    after(alerts, 0, overhead_share=0.2)
    after(alerts, 20, overhead_share=0.01)
    assert not after(alerts, 20, overhead_share=0.2)
    assert after(alerts, 30, overhead_share=0.2) == {
        "RoutingOverheadNoticeable",
        "RoutingOverheadHigh",
    }
    assert len(after(alerts, 300)) == 2, "an idle service neither raises nor clears"


def test_five_and_ten_percent_are_told_apart(alerts):
    after(alerts, 0, overhead_share=0.07)
    assert after(alerts, 30, overhead_share=0.07) == {"RoutingOverheadNoticeable"}


def test_operators_set_two_of_the_thresholds():
    rules = {rule.name: rule for rule in with_thresholds(2.0, 1.5)}
    assert (rules[MEAN_LATENCY].raise_above, rules[EXPERT_IDLE].raise_above) == (2.0, 90.0)
    assert len(rules) == len(RULES)


def test_balance_by_both_published_definitions():
    """Counts [6, 2, 0, 0] by expert: 6 / 2 - 1. Rows [30, 10] by device: 20 / 30."""
    found = balance(np.array([[6, 2, 0, 0]]), np.array([[30, 10]]))
    assert found == {"max_violation": pytest.approx(2.0), "balancedness": pytest.approx(20 / 30)}
    assert balance(np.zeros((1, 4), np.int64), np.zeros((1, 2), np.int64)) == {}


def step(experts, version=0, **options):
    """A step of one row a token in the shipped model's shape, all rows to the same experts."""
    from engine.events import StepEvent

    ids = np.tile(np.array(experts, np.int16), (len(options.get("causes", [0])), 4, 1))
    rows = len(ids)
    return StepEvent(
        step=0, time_s=0, duration_ms=10.0, table_version=version, num_running=1, num_waiting=0,
        num_prefill_rows=0, request_ids=np.zeros(rows, np.int64),
        positions=np.zeros(rows, np.int32), token_ids=np.zeros(rows, np.int32),
        homes=np.zeros(rows, np.int16), causes=np.array(options.get("causes", [0]), np.uint8),
        topk_ids=ids, phy_ids=ids, topk_weights=ids.astype(np.float32),
        margins=np.zeros((rows, 4), np.float32),
        stage_ms={"select": 0.5, "place": 0.3, "sort": 0.2, "experts": 9.0}, bad_rows=0,
    )  # fmt: skip


def test_the_tally_counts_work_and_forgets_what_is_old():
    tally = ServeTally(read_config(MODEL), 2, clock := Clock())
    tally.emit(step([0, 1], causes=[0, 0, 1]))
    tally.emit(step([2, -1]))
    assert tally.counts_LE[:, :3].tolist() == [[3, 3, 1]] * 4
    assert tally.rows == {"accepted": 3, "preemption": 1}
    assert tally.recent().overhead_share == pytest.approx(0.1)
    tally.ended(3.0)
    tally.ended(1.0)
    assert tally.recent().mean_latency_s == pytest.approx(2.0)
    clock.now += WINDOW_S + 1
    recent = tally.recent()
    assert recent.overhead_share is None and recent.mean_latency_s is None and not recent.balance
    assert tally.counts_LE.sum() == 28, "sums since the start stay"


def test_an_expert_is_idle_by_the_clock_however_few_steps_there_are():
    tally = ServeTally(read_config(MODEL), 1, clock := Clock())
    tally.emit(step([0, 1]))
    for _ in range(5):
        clock.now += 20
        tally.emit(step([0, 2]))
    assert tally.idle_LE()[0].tolist()[:4] == [0, 100, 0, 100]
    assert readings(tally, Health(1), 0)["expert_idle_s"] == 100.0


def test_a_pause_of_the_whole_service_makes_no_expert_idle_for_more_than_a_minute():
    tally = ServeTally(read_config(MODEL), 1, clock := Clock())
    tally.emit(step([0, 1]))
    clock.now += 28_800
    assert not tally.idle_LE().any(), "nothing ran since"
    tally.emit(step([0, 2]))
    assert tally.idle_LE()[0].tolist()[:4] == [0, PAUSE_S, 0, PAUSE_S]


def test_a_lost_rank_and_one_behind_are_read():
    health = Health(3)
    tally = ServeTally(read_config(MODEL), 3, Clock())
    tally.table_version, tally.rank_versions = 5, {0: 5, 1: 4, 2: 5}
    health._living = {0, 1}
    now = readings(tally, health, 7)
    assert (now["ranks_silent"], now["rank_table_lag"], now["num_waiting"]) == (1.0, 1.0, 7.0)
