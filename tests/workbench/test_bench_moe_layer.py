"""The measurement of one layer's experts: its arithmetic, and that a wrong layer is not timed."""

from __future__ import annotations

import pytest
import torch

from engine.errors import RequestError
from workbench.bench import moe_layer
from workbench.bench.moe_layer import Shape


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(moe_layer, "SHAPES", (Shape("tiny", 4, 2, 64, 32),))
    monkeypatch.setattr(moe_layer, "BURST_MS", 0.01)
    monkeypatch.setattr(moe_layer, "_product_rate", lambda name: 1e9)


def test_every_format_has_a_row_with_its_peers_and_the_aims_are_judged(small):
    found = moe_layer.run(tokens=(1, 16), rounds=1, threads=1)
    assert [(r["tokens"], r["dtype"]) for r in found["rows"]] == [
        (tokens, dtype)
        for group in (("fp32",), ("bf16", "int8"))
        for tokens in (1, 16)
        for dtype in group
    ]
    for row in found["rows"]:
        assert set(row["peers_ms"]) == set(moe_layer.PEERS) and row["ours_ms"] > 0
        best = min(row["peers_ms"].values())
        assert row["speedup_over_best_peer"] == pytest.approx(best / row["ours_ms"], rel=0.02)
    assert set(found["geomean_speedup"]) == {"fp32", "bf16"}
    speedups = [r["speedup_over_best_peer"] for r in found["rows"] if r["dtype"] != "int8"]
    assert found["worst_speedup"] == min(speedups)
    aims = found["aims"]
    assert aims["fp32"]["met"] == (found["geomean_speedup"]["fp32"] >= 1.15)
    assert "machine" in found and found["label"] == "measured"


def test_batched_mm_is_left_out_by_name_where_it_would_copy_too_much(small, monkeypatch):
    monkeypatch.setattr(moe_layer, "MOST_COPIED", 16 * 2 * 3 * 64 * 32 * 4 - 1)
    rows = moe_layer.run(tokens=(1, 16), rounds=1, threads=1)["rows"]
    small_batch, large_batch = rows[0], rows[1]
    assert "batched_mm" in small_batch["peers_ms"] and "left_out" not in small_batch
    assert "batched_mm" not in large_batch["peers_ms"]
    assert large_batch["left_out"].startswith("batched_mm: would copy")


@pytest.mark.parametrize("wrong", [torch.zeros_like, lambda y: y.roll(1, 0), lambda y: 2 * y])
def test_a_wrong_layer_is_not_timed(small, monkeypatch, wrong):
    right = moe_layer.Layer.__call__
    monkeypatch.setattr(moe_layer.Layer, "__call__", lambda *args: wrong(right(*args)))
    with pytest.raises(AssertionError, match="fp32 is off by"):
        moe_layer.run(tokens=(4,), rounds=1, threads=1)


def test_numbers_below_one_are_refused():
    with pytest.raises(RequestError, match="at least 1"):
        moe_layer.run(tokens=(0,))
