"""Calibration finds what is sensitive, reports add up, and commands refuse what they cannot do."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from workbench.precision import calibrate, engines, texts
from workbench.precision import told as show
from workbench.precision.probe import run
from workbench.precision.speed import SIZES, WAYS, run_by_run, runs_of, verdict
from workbench.report import generation_summary


@pytest.fixture(scope="module")
def engine():
    return engines.open_both("polyglot-moe", threads=1, measuring=True)[0]


@pytest.fixture(scope="module")
def windows(engine):
    by_domain = texts.windows(engine.tokenizer, "train", 1, 48)
    assert len(by_domain) == 8 and {len(w[0]) for w in by_domain.values()} == {49}
    return [window for some in by_domain.values() for window in some]


def spoil(engine, layer):
    """Let one channel of a layer's input carry nearly all of its size, and the same results."""
    module = engine.transformer.layers[layer]
    with torch.no_grad():
        module.ffn_norm.weight[7] *= 1024
        module.moe.gate.weight[:, 7] /= 1024
        gate_up = module.moe.experts.gate_up.clone()
        gate_up[:, :, 7] /= 1024
        module.moe.experts.replace(
            module.moe.experts.others(gate_up, module.moe.experts.down.clone())
        )


def test_a_layer_that_int8_does_not_suit_is_found_and_put_on_the_whitelist(windows):
    engine = engines.open_both("polyglot-moe", threads=1, measuring=True)[0]
    full = run(engine_in_full(engine), windows)
    spoil(engine, 2)
    again = run(engine_in_full(engine), windows)
    assert again.perplexity == pytest.approx(full.perplexity, rel=0.01), "the model is the same"
    # So few tokens say little of perplexity: the layers' own errors are to tell.
    found, measured = calibrate.calibrate(engine, windows, weights_sha256="x", max_rise=1.0)
    assert [limits.whitelist for limits in found.layers] == [False, False, True, False]
    assert "further off" in found.layers[2].why
    assert measured["layers"][2]["error_median"] > 5 * measured["layers"][1]["error_median"]
    assert abs(measured["perplexity_rise"]) < 0.03
    mixed = run(engine, windows)
    assert mixed.total("int8_rows") and not sum(u.int8_rows for u in mixed.layers[2].units)


def engine_in_full(engine):
    engine.control.set_precision("model")
    return engine


def test_a_feature_is_a_limit_only_where_it_tells_the_hurt_from_the_rest():
    hurt = np.zeros(1000, bool)
    hurt[:100] = True
    tells, says_nothing = np.zeros(1000, bool), np.zeros(1000, bool)
    tells[:150], says_nothing[::7] = True, True
    assert calibrate._times(hurt, tells) > 100
    assert 0.8 < calibrate._times(hurt, says_nothing) < 1.2
    assert calibrate._times(hurt, ~np.zeros(1000, bool)) == 1.0, "nothing left to compare with"


@pytest.mark.timeout(240)
def test_calibrate_and_report_from_the_command_line(workbench, tmp_path, capfd):
    file = tmp_path / "precision.json"
    small = ("--windows", "1", "--length", "16", "--threads", "1", "--json")
    made = workbench("precision", "calibrate", "--out", file, "--unit-rows", "8", *small).json
    assert json.loads(file.read_text())["unit_rows"] == 8 == made["thresholds"]["unit_rows"]
    assert len(made["measured"]["layers"]) == 4
    told = workbench("precision", "report", "--thresholds", file, "--rounds", "0", *small).json
    quality = told["quality"]
    assert quality["tokens"] == 8 * 16 and len(quality["layers"]) == 4
    assert set(quality["perplexity"]) == {"full", "int8", "mixed", "int8_rise", "mixed_rise"}
    assert len(quality["kinds"]) == 4 and told["experts"] == [] and told["verdict"] == ""
    assert quality["units"]["rows"] == 8 * 16 * 4 * 2
    for perplexity in quality["perplexity_by_domain"].values():
        assert perplexity["mixed"] == pytest.approx(perplexity["full"], rel=0.25)
    show.quality(quality)
    text = capfd.readouterr().out
    assert f"{quality['int8_share_of_units']:.1%} of units in INT8" in text
    report = workbench(
        *("generate", "12 * 7 = ", "--precision", "auto", "--thresholds", file),
        *("--max-tokens", "4", "--json"),
    ).json
    assert "bfloat16 or int8" in report["precision"]
    assert report["routing"]["rows"] == report["prompt_tokens"] + 3
    units = report["routing"]["units"]
    assert units["all"] >= units["int8"] >= units["failed"] >= 0 and units["all"] >= 4 * 4
    assert generation_summary(report, 1.0).count(f"of {units['all']} units of rows in INT8") == 1
    explained = workbench(
        *("explain", "12 * 7 = ", "--token", "2", "--layer", "1", "--precision", "auto"),
        *("--thresholds", file, "--json"),
    ).json
    assert explained["format"] in ("int8", "bfloat16", "int8, bfloat16", "bfloat16, int8")


def test_commands_refuse_what_they_cannot_do(workbench, tmp_path):
    file = tmp_path / "none.json"
    workbench("precision", "report", "--thresholds", file).assert_refused(2, "is missing")
    workbench("precision", "calibrate", "--unit-rows", "0").assert_refused(2, "unit_rows")
    workbench("precision", "calibrate", "--unit", "token").assert_refused(2, "unit", "sequence")
    for name, value in (("windows", "0"), ("windows", "1025"), ("length", "15"), ("length", "513")):
        for command in ("calibrate", "report"):
            workbench("precision", command, f"--{name}", value).assert_refused(2, name, value)
    for out in (tmp_path, tmp_path / "no" / "x.json"):
        words = ("precision", "calibrate", "--windows", "1", "--length", "16", "--out", out)
        workbench(*words).assert_refused(2, f"cannot write {out}")
    workbench("precision", "calibrate", "--max-rise", "2").assert_refused(2, "max_rise")
    workbench("generate", "x", "--precision", "bf16", "--dtype", "float32").assert_refused(
        2, "bf16", "float32"
    )
    workbench("generate", "x", "--precision", "auto", "--deterministic").assert_refused(
        2, "deterministic"
    )
    workbench("generate", "x", "--thresholds", file).assert_refused(2, "no effect")
    workbench("precision", "calibrate", "--model", "polyglot-draft").assert_refused(2, "experts")


def test_runs_and_the_verdict_are_told_from_their_numbers():
    formats = np.array([0, 1, 1, 1], np.int8)
    assert runs_of([3, 1], formats) == [(0, 0, 1, False), (0, 1, 3, True), (1, 3, 4, True)]
    assert runs_of([0, 0], formats[:0]) == []

    def shape(times):
        rows = [
            {"unit_rows": size} | {way: us for way, _ in WAYS}
            for size, us in zip(SIZES, times, strict=True)
        ]
        return [{"name": "a shape", "by_size": rows}]

    assert "lead by 20%, one row at a time 9.00" in verdict(shape([900, 300, 200, 100, 120]))
    assert "equal 32" in verdict(shape([101, 101, 101, 100, 100]))
    assert "lose to 32 by 100%" in verdict(shape([900, 800, 400, 200, 100]))


def test_run_by_run_gives_what_one_call_gives():
    from engine.kernels.cpu_mixed import mixed_mlp, prepare_mixed
    from engine.kernels.experts import ExpertWeights

    torch.manual_seed(0)
    stacks = torch.randn(3, 32, 16).bfloat16() / 4, torch.randn(3, 16, 16).bfloat16() / 4
    weights = ExpertWeights(*stacks, prepare_mixed)
    weights.refresh()
    rows, counts = torch.randn(40, 16).bfloat16(), [20, 0, 20]
    formats = (torch.arange(40) // 8 % 2).to(torch.int8)
    whole = mixed_mlp(rows, counts, [0, 1, 2], weights, formats)
    apart = run_by_run(rows, runs_of(counts, formats.numpy()), weights)
    assert torch.allclose(whole.float(), apart.float(), atol=0.02)
