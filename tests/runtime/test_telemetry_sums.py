"""What the telemetry counts: by hand, bounded, from nothing for each engine."""

from __future__ import annotations

import numpy as np
import pytest

from engine.events import ControlEvent, RequestEvent, TextEvent
from engine.runtime.telemetry import Aggregator
from tests.runtime.telemetry_examples import (
    EXPERTS,
    LAYERS,
    TOP_K,
    added,
    start_event,
    step_event,
)


def test_counts_stand_by_domain_layer_and_expert():
    sums = Aggregator()
    sums.add([start_event(), added(1, "en"), added(2, "de")])
    sums.add([step_event((1, 1, 2), (0, 3)), step_event((2,), (4, 3))])
    frame = sums.frame(1, 100.1)
    assert frame.meta["domains"] == ["en", "de"]
    expected = np.zeros((2, LAYERS, EXPERTS), int)
    expected[0, :, 0] = expected[0, :, 3] = 2
    expected[1, :, 0] = 1
    expected[1, :, 3] = 2
    expected[1, :, 4] = 1
    np.testing.assert_array_equal(frame.arrays["total"], expected)
    np.testing.assert_array_equal(frame.arrays["counts"], expected.sum(axis=0))
    assert frame.arrays["total"].sum() == frame.meta["totals"]["rows"] * LAYERS * TOP_K

    sums.add([step_event((1,), (1, -1), 100.2)])
    later = sums.frame(2, 100.3)
    assert later.arrays["counts"].tolist() == [[0, 1, 0, 0, 0]] * LAYERS, "-1 is no expert"
    assert (later.arrays["total"] - frame.arrays["total"]).sum() == LAYERS


def test_rates_latency_and_overhead_have_their_formulas():
    sums = Aggregator(prompt_text=lambda ids: f"prompt {ids}")
    sums.add([start_event(100.0), added(1, "en", 100.0)])
    for n in range(20):
        at = 100.0 + 0.1 * n
        sums.add([step_event((1, 1, 1), (0, 1), at), TextEvent(1, "en", "a", n + 1, False, at)])
    meta = sums.frame(1, 102.0).meta
    assert meta["generated_per_s"] == pytest.approx(10.0)
    assert meta["rows_per_s"] == pytest.approx(30.0)
    assert meta["step_p50_ms"] == pytest.approx(10.0)
    assert meta["overhead_share"] == pytest.approx((0.2 + 0.1 + 0.3) / 10.0)
    assert meta["level_share"] == pytest.approx(
        {"expert": 0.02, "precision": 0.0, "model": 0.0, "device": 0.04}
    )
    assert sum(meta["level_share"].values()) == pytest.approx(meta["overhead_share"])
    assert meta["rows_per_step"] == 3
    assert meta["stage_ms"]["attention"] == pytest.approx(6.0)
    assert (meta["num_running"], meta["num_waiting"]) == (3, 2)
    assert meta["idle_s"] == pytest.approx(0.09)
    (request,) = meta["requests"]
    assert request["text"] == "a" * 20 and request["num_tokens"] == 20
    assert request["prompt"] == "prompt (7, 8)"


def test_an_idle_engine_counts_to_zero():
    sums = Aggregator()
    sums.add([start_event(), added(1, "en"), step_event((1,), (0, 1))])
    sums.frame(1, 100.0)
    meta = sums.frame(2, 160.0).meta
    assert meta["rows_per_s"] == meta["generated_per_s"] == 0.0
    assert meta["step_p50_ms"] is None and meta["overhead_share"] is None
    assert sums.frame(3, 160.1).arrays["smoothed"].max() < 1e-6
    assert sums.frame(3, 160.2).arrays["counts"].sum() == 0


def test_smoothed_counts_fade_with_their_time_constant():
    sums = Aggregator()
    sums.add([start_event(), added(1, "en"), step_event((1,), (0, 1))])
    first = sums.frame(1, 100.0).arrays["smoothed"].sum()
    later = sums.frame(2, 103.0).arrays["smoothed"].sum()
    assert first == LAYERS * TOP_K
    assert later == pytest.approx(first / np.e, rel=1e-5)


def test_a_new_engine_starts_from_nothing():
    sums = Aggregator()
    sums.add([start_event(), added(1, "en"), step_event((1,), (0, 1)), start_event(101.0)])
    frame = sums.frame(1, 101.0)
    assert frame.arrays["total"].sum() == 0 and frame.meta["totals"]["steps"] == 0
    assert frame.meta["requests"] == [] and frame.meta["step"] is None


def test_finished_requests_linger_and_leave():
    sums = Aggregator()
    done = RequestEvent(1, "finished", "en", 101.0, finish_reason="stop")
    sums.add([start_event(), added(1, "en"), added(2, "de"), done])
    listed = {r["id"]: r["state"] for r in sums.frame(1, 101.1).meta["requests"]}
    assert listed == {1: "stop", 2: "running"}
    sums.frame(2, 110.0)
    assert [r["id"] for r in sums.frame(3, 110.1).meta["requests"]] == [2]


def test_what_is_held_stays_bounded():
    sums = Aggregator()
    sums.add([start_event()])
    for n in range(200):
        sums.add([added(n, f"domain {n}"), TextEvent(n, "", "x" * 5000, 1, False, 100.0)])
    sums.add([step_event((199,), (0, 1)), ControlEvent("publish_table", {}, 2, 100.0)])
    frame = sums.frame(1, 100.1)
    assert len(frame.meta["domains"]) == 32 and frame.meta["domains"][-1] == "other"
    assert frame.arrays["total"][-1].sum() == LAYERS * TOP_K
    assert len(frame.meta["requests"]) == 32 and frame.meta["num_requests"] == 200
    assert max(len(r["text"]) for r in frame.meta["requests"]) == 400
    assert frame.meta["controls"][0]["action"] == "publish_table"
    assert frame.meta["table_version"] == 2
