"""`levels`, `experiment smoothing`, `bench routing-overhead`: their keys and formulas."""

from __future__ import annotations

import numpy as np
import pytest

from engine import Engine, EngineConfig
from engine.events import LEVELS
from engine.runtime.deciding import overhead_state
from workbench import paths
from workbench.bench import random_model, smoothing
from workbench.trace import synthetic as made

KEYS = [
    "level",
    "timing",
    "decisions_per_s",
    "share_of_step",
    "hit_rate",
    "rows_rerun",
    "gain",
]


def test_levels_has_exactly_the_keys_of_the_contract(workbench):
    report = workbench("levels", "--tokens", "6", "--rounds", "1", "--json").json
    assert [list(row) for row in report["rows"]] == [KEYS] * 4
    timing = {row["level"]: row["timing"] for row in report["rows"]}
    assert timing == {
        "expert": "real-time",
        "precision": "predicted",
        "model": "predicted",
        "device": "real-time",
    }
    assert list(report["formulas"]) == KEYS[2:] and report["label"] == "measured"
    by_level = {row["level"]: row for row in report["rows"]}
    for level in ("expert", "device"):
        assert by_level[level]["decisions_per_s"] > 0 and by_level[level]["rows_rerun"] == 0
        assert 0 < by_level[level]["share_of_step"] < 1
    assert by_level["device"]["decisions_per_s"] == pytest.approx(
        2 * by_level["expert"]["decisions_per_s"], rel=1e-3
    )
    assert by_level["expert"]["hit_rate"] is None and 0 <= by_level["device"]["hit_rate"] <= 1
    assert by_level["model"]["gain"] > 0 and by_level["model"]["decisions_per_s"] > 0


def test_levels_for_people_names_each_level_and_its_formula(workbench):
    said = workbench("levels", "--tokens", "4", "--rounds", "1")
    assert said.code == 0
    for word in (*LEVELS, "real-time", "predicted", "share_of_step:"):
        assert word in said.out


def test_the_overhead_bench_prints_numerator_and_denominator_of_every_way(workbench):
    words = ("--batches", "1,2", "--steps", "2", "--rounds", "1", "--no-large", "--no-draft")
    words += ("--no-ranks",)
    report = workbench("bench", "routing-overhead", *words, "--json").json
    ways = [(row["setting"], row["batch"], row["way"]) for row in report["rows"]]
    assert ways == [
        (setting, batch, way)
        for setting, names in (
            ("one copy", ("all", "no look-ups", "a lock")),
            ("replicas", ("all", "no look-ups", "a lock")),
            ("formats by unit", ("all", "not ahead")),
        )
        for batch in (1, 2)
        for way in names
    ]
    for row in report["rows"]:
        spent = sum(row[f"{level}_ms"] for level in LEVELS)
        assert row["deciding_ms"] == pytest.approx(spent, abs=0.002)
        assert row["share"] == pytest.approx(row["deciding_ms"] / row["step_ms"], abs=0.001)
        assert row["state"] == overhead_state(row["share"]) and row["steps"] == 2
        assert (row["look_up_hit_rate"] is None) == (row["way"] == "no look-ups")
    assert report["aim"] == {"batch": 32, "share": 0.05}
    assert any("small-batch" in note for note in report["notes"])


def test_a_random_model_of_a_shape_runs_and_is_the_same_each_time(tmp_path):
    shape = random_model.Shape(layers=1, heads=1, experts=6, top_k=3, expert_width=16)
    like = paths.model_folder(paths.DEFAULT_MODEL)
    one, other = (random_model.write(tmp_path / name, like, shape) for name in "ab")
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    engine = Engine(EngineConfig(model=one, num_blocks=16))
    found = engine.model_config
    assert (found.num_experts, found.top_k, found.hidden_size) == (6, 3, 64)
    assert np.isfinite(engine.logits([5, 6, 7])).all()


def test_smoothing_is_reported_whole_and_against_none(workbench):
    words = ("--strengths", "0,2", "--requests", "2", "--tokens", "6", "--texts", "1")
    report = workbench("experiment", "smoothing", *words, "--rounds", "1", "--json").json
    plain, smoothed = report["rows"]
    assert (plain["strength"], smoothed["strength"]) == (0, 2)
    assert plain["kl_nats"] == 0 and plain["same_text"] == "2 of 2"
    assert smoothed["kl_nats"] > 0 and smoothed["jump_rate"] < plain["jump_rate"]
    for row in report["rows"]:
        assert set(row) == {"strength", "window", "decay"} | set(report["formulas"])
        assert 0 < row["pattern_stability"] <= 1 <= row["balance"]
        assert row["decode_tokens_per_s"] > 0 and row["prompt_tokens_per_s"] > 0
        assert 0.5 < row["bits_per_byte"] < 5


def test_a_tighter_capacity_drops_more_and_evens_the_load(workbench):
    words = ("--factors", "2,1", "--texts", "1", "--json")
    rows = workbench("experiment", "capacity", *words).json["rows"]
    assert [row["factor"] for row in rows] == [None, 2, 1]
    dropped, balance, kl = (
        [row[name] for row in rows] for name in ("dropped_share", "balance", "kl_nats")
    )
    assert dropped[0] == kl[0] == 0 and dropped[0] < dropped[1] < dropped[2] < 1
    assert balance[0] > balance[1] > balance[2] >= 1 and 0 < kl[1] < kl[2]


def test_jumps_and_balance_by_hand():
    start = made.start_event(layers=1, experts=4)
    steps = []
    for number, ids in enumerate([(0, 1), (1, 0), (1, 2)]):
        step = made.step_event(start, number, 1)
        step.topk_ids = np.array([[ids]], np.int16)
        steps.append(step)
    assert smoothing.jump_rate(steps) == 0.5
    assert smoothing.balance(steps, 4) == pytest.approx(3 / 1.5)
    assert smoothing._alike(np.array([[2, 0]]), np.array([[1, 1]])) == 0.5


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        (("levels", "--tokens", "0"), 2, "tokens (0) must lie between 1 and 240"),
        (("levels", "--tokens", "241"), 2, "tokens (241)"),
        (("levels", "--rounds", "1001"), 2, "rounds (1001)"),
        (("experiment", "smoothing", "--requests", "1025"), 2, "requests (1025)"),
        (("experiment", "smoothing", "--texts", "0"), 2, "texts (0)"),
        (("experiment", "capacity", "--texts", "1025"), 2, "texts (1025)"),
        (("levels", "--model", "polyglot-draft"), 1, "no experts"),
        (("experiment", "smoothing", "--strengths", "a"), 2, "--strengths (a)"),
        (("experiment", "smoothing", "--window", "0"), 2, "window (0)"),
        (("experiment", "smoothing", "--tokens", "0"), 2, "at least 1"),
        (("experiment", "smoothing", "--model", "polyglot-draft"), 1, "no experts"),
        (("experiment", "capacity", "--factors", "x"), 2, "--factors (x)"),
        (("experiment", "capacity", "--factors", "0.5"), 2, "capacity_factor (0.5)"),
        (("bench", "routing-overhead", "--steps", "0"), 2, "at least 1"),
        (("bench", "routing-overhead", "--batches", "x"), 2, "--batches (x)"),
    ],
)
def test_bad_usage_is_one_sentence(workbench, words, code, hint):
    workbench(*words).assert_refused(code, hint)
