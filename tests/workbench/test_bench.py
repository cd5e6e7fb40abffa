"""The benchmarks measure what they say, on few tokens here, and count their rows."""

from __future__ import annotations

import pytest

from workbench.bench import recorder as recorder_bench


def assert_report(report, rows):
    assert report["label"] == "measured" and len(report["rows"]) == rows
    assert report["command"].startswith("workbench bench ") and "--json" in report["command"]
    assert {"cpu", "cores", "threads", "load_average", "torch"} <= set(report["machine"])


def test_recorder_pairs_steps_and_counts_rows(workbench):
    words = ("--batches", "1,3", "--tokens", "4", "--rounds", "2", "--json")
    report = workbench("bench", "recorder", *words).json
    assert_report(report, 2)
    for row, batch in zip(report["rows"], (1, 3), strict=True):
        assert row["batch"] == batch
        assert row["rows_recorded"] == row["rows_expected"] == batch * (8 + 4 - 1)
        assert row["pairs"] == 2 * (4 - 1)
        assert row["step_ms_without"] > 0 and row["step_ms_with"] > 0
        assert -1 < row["overhead"] < 10 and -1 < row["overhead_cpu"] < 10


def test_recorder_bench_notices_a_recorder_that_loses_rows(workbench, monkeypatch):
    class Forgetful(recorder_bench.Recorder):
        def __init__(self):
            super().__init__(max_rows=5)

    monkeypatch.setattr(recorder_bench, "Recorder", Forgetful)
    with pytest.raises(AssertionError, match="rows, not"):
        workbench("bench", "recorder", "--batches", "1", "--tokens", "4", "--rounds", "1")


def test_decode_runs_against_transformers_and_gets_the_same_text(workbench):
    words = ("--batches", "1,2", "--tokens", "4", "--rounds", "1", "--json")
    report = workbench("bench", "decode", *words).json
    assert_report(report, 2)
    for row, batch in zip(report["rows"], (1, 2), strict=True):
        assert row["same_text"] == f"{batch} of {batch}"
        assert row["ratio"] > 0 and row["transformers_tokens_per_second"] > 0


def test_decode_without_transformers_says_so(workbench, monkeypatch):
    monkeypatch.setattr("workbench.bench.decode.find_spec", lambda name: None)
    words = ("bench", "decode", "--batches", "1", "--tokens", "2", "--rounds", "1")
    workbench(*words).assert_refused(1, "transformers is not installed")
    report = workbench(*words, "--no-transformers", "--json").json
    assert "ratio" not in report["rows"][0] and report["rows"][0]["tokens_per_second"] > 0


def test_startup_times_its_marks_in_order(workbench):
    report = workbench("bench", "startup", "--rounds", "1", "--json").json
    assert_report(report, 4)
    names = [row["name"] for row in report["rows"]]
    assert names == ["python_running", "engine_imported", "ready", "first_token"]
    times = [row["ms_median"] for row in report["rows"]]
    assert 0 < times[0] and times == sorted(times)


def test_the_form_for_people_names_machine_and_formula(workbench):
    said = workbench("bench", "recorder", "--batches", "1", "--tokens", "2", "--rounds", "1")
    assert said.code == 0 and "measured on" in said.out and "median over step pairs" in said.out


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("recorder", "--batches", "1,x"), "--batches (1,x)"),
        (("recorder", "--batches", "0"), "--batches (0)"),
        (("recorder", "--tokens", "0"), "at least 1"),
        (("decode", "--rounds", "0"), "at least 1"),
        (("decode", "--dtypes", "int4"), "float32, bfloat16"),
        (("decode", "--threads", "0"), "threads (0)"),
        (("decode", "--threads", "999999"), "threads (999999) must lie between 1 and"),
        (("recorder", "--threads", "999999"), "threads (999999) must lie between 1 and"),
        (("moe-layer", "--threads", "999999"), "threads (999999) must lie between 1 and"),
        (("gate", "--threads", "999999"), "threads (999999) must lie between 1 and"),
        (("moe-layer", "--tokens", "x"), "--tokens (x)"),
        (("gate", "--tokens", "x"), "--tokens (x)"),
        (("moe-layer", "--tokens", "9" * 20), "--tokens (9999"),
        (("gate", "--tokens", "9" * 5000), "--tokens (9999"),
        (("decode", "--batches", "9" * 20), "--batches (9999"),
        (("decode", "--tokens", "9" * 20, "--no-transformers"), "9999"),
        (("recorder", "--tokens", "9" * 20), "9999"),
        (("dispatch", "--ranks", "1000000"), "ranks (1000000)"),
        (("startup", "--rounds", "0"), "at least 1"),
        (("flights",), "flights"),
    ],
)
def test_bad_usage_is_one_sentence(workbench, words, hint):
    workbench("bench", *words).assert_refused(2, hint)
