"""The GPU bench runs to its end whatever its sections do, and a dry run measures nothing."""

from __future__ import annotations

import datetime
import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

pytest.importorskip("triton")

from engine.kernels.gpu import tiles
from workbench.bench.gpu import layer, report, runner
from workbench.bench.gpu.__main__ import main
from workbench.bench.gpu.inputs import batch, native_weights
from workbench.bench.gpu.oracle import errors, moe
from workbench.bench.gpu.sections import SECTIONS, TOTAL_SECONDS
from workbench.bench.gpu.setting import Setting
from workbench.bench.gpu.shapes import SHAPES, TINY

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(400)  # the dry run starts eight processes that load torch


@pytest.fixture(scope="module")
def dry(tmp_path_factory):
    """Run everything dry, once, as a user would."""
    out = tmp_path_factory.mktemp("dry")
    before = files()
    done = subprocess.run(
        [sys.executable, "-m", "workbench.bench.gpu", "--dry-run", "--out", str(out)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert files() == before, "a dry run left something among the measurements"
    (as_json,) = out.glob("cpu-dry-run-*.json")
    return done, json.loads(as_json.read_text(encoding="utf-8")), out


def files():
    folders = (ROOT / "data" / "benchmarks", tiles.TUNED)
    return sorted(path for folder in folders for path in folder.glob("*"))


def test_a_dry_run_runs_every_kind_of_section_and_finds_all_right(dry):
    done, found, _ = dry
    assert done.returncode == 0, done.stderr + done.stdout
    assert set(found["sections"]) == {section.name for section in SECTIONS if section.dry}
    for name, section in found["sections"].items():
        assert section["error"] is None and section["rows"], name
        assert not any("error" in row or "skipped" in row for row in section["rows"]), name
    checked = [row for section in found["sections"].values() for row in section["rows"]]
    checked = [row["right"] for row in checked if "right" in row]
    assert len(checked) > 20 and all(checked)


def test_a_dry_run_shows_that_each_check_can_fail(dry):
    _, found, _ = dry
    for name in ("correctness", "formats"):
        controls = [row for row in found["sections"][name]["rows"] if row.get("op") == "control"]
        assert len(controls) == 5 and all(row["right"] for row in controls)


def test_a_dry_run_holds_the_peers_to_the_same_result(dry):
    _, found, _ = dry
    for name in ("mixtral-8x7b", "deepseek-v3"):
        rows = [row for row in found["sections"][name]["rows"] if "tokens" in row]
        limit = layer.TOLERANCE[SHAPES[name].scheme]
        for row in rows:
            differences = row["peers_rms_difference"]
            assert {"transformers eager", "torch grouped_mm"} <= set(differences)
            assert all(value < limit for value in differences.values()), differences


def test_a_dry_run_gives_no_figure(dry):
    done, found, out = dry
    assert found["label"] == "dry run" and "nothing here is a measurement" in done.stdout
    text = (out / next(out.glob("*.md")).name).read_text(encoding="utf-8")
    assert text == done.stdout.removesuffix("\n")
    for name, section in found["sections"].items():
        keys = {key for row in section["rows"] for key, value in row.items() if value}
        figures = {key for key in keys if key.endswith("_ms") or "speedup" in key}
        assert not figures | keys & {"value", "roofline_share"}, name


def test_a_dry_run_writes_tiles_that_the_engine_can_read(dry):
    _, _, out = dry
    tuned = tiles.load_tuned(out / "tuned-cpu-dry-run.json")
    assert set(tuned) == {("native", "bfloat16", 16), ("e4m3", "bfloat16", 16)}


# --- sections that fail ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broken():
    """Replace each section's process by one that raises, is killed, hangs, or works."""
    said = []
    began = time.monotonic()
    names = ("ceilings", "correctness", "formats", "large", "gate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "CHILD", "tests.workbench.gpu_child")
        patch.setattr(runner, "DRY_SECONDS", 2)
        patch.setattr(runner, "GRACE_SECONDS", 0.5)
        found = runner.run(names=names, dry=True, say=said.append)
    return found, said, time.monotonic() - began


def test_what_a_section_does_costs_the_others_nothing(broken):
    found, said, seconds = broken
    sections = found["sections"]
    assert "an illegal memory access" in sections["correctness"]["error"]
    assert "ended with -9" in sections["formats"]["error"]
    assert "it was not done" in sections["large"]["error"]
    assert sections["ceilings"]["error"] is None and sections["gate"]["error"] is None
    for name in ("correctness", "formats", "large", "gate"):
        assert [row["section"] for row in sections[name]["rows"]] == [name]
    assert seconds < 60 and len(said) == 5
    assert not runner.well(found)


def test_later_sections_are_told_the_ceilings(broken):
    found, _, _ = broken
    (row,) = found["sections"]["gate"]["rows"]
    assert row["told"] == {"copy_gbs": 100.0}


def test_a_report_with_failures_is_still_written(broken, tmp_path):
    found, _, _ = broken
    as_json, as_page = report.write(found, tmp_path)
    assert json.loads(as_json.read_text()) == found and as_json.stem.startswith("a-stand-in-")
    assert "an illegal memory access" in as_page.read_text()


def test_a_report_is_written_even_when_no_section_began(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "CHILD", "tests.workbench.no_such_module")
    found = runner.run(names=("gate",), dry=True, say=lambda line: None)
    assert "No module named" in found["sections"]["gate"]["error"] and not runner.well(found)
    _, as_page = report.write(found, tmp_path)
    assert "unknown-device" in as_page.name and "torch ?" in as_page.read_text()


def test_what_a_section_needs_runs_before_it_and_takes_no_place_of_its_own():
    waves = list(runner._waves(("deepseek-v3",), None, dry=False))
    names = [[section.name for section, _ in wave] for wave in waves]
    assert names == [["ceilings"], ["prepare-deepseek-v3"], ["deepseek-v3"]]
    (first, *_), (second, *_) = runner._waves(("tune",), 9, dry=False)
    assert first[0].name == "prepare-tiles-0" and second == (second[0], 9)
    assert list(runner._waves(("tune",), 0, dry=False)) == []
    assert not any(name.startswith("prepare") for name in runner.known_sections())


def test_a_case_that_raises_keeps_its_row_and_its_reason(tmp_path):
    setting = Setting(dry=True, deadline=time.monotonic() + 60, path=tmp_path / "rows")
    with setting.case(tokens=1) as row:
        row["ours_ms"] = float("nan")
        raise ValueError("two\nlines")
    late = Setting(dry=True, deadline=0.0, path=setting.path)
    assert late.late(tokens=2) and not setting.late(tokens=3)
    rows = [json.loads(line) for line in setting.path.read_text().splitlines()]
    assert rows[0] == {"tokens": 1, "ours_ms": "nan", "error": "ValueError: two lines"}
    assert rows[1]["tokens"] == 2 and "time was up" in rows[1]["skipped"]
    assert len(rows) == 2


# --- figures --------------------------------------------------------------------------------------


def test_the_floor_is_the_larger_of_bytes_and_products(tmp_path):
    shape = SHAPES["mixtral-8x7b"]
    ceilings = {"copy_gbs": 4000.0, "bf16_tflops": 800.0, "fp8_tflops": 1600.0}
    setting = Setting(dry=True, deadline=0.0, path=tmp_path / "rows", ceilings=ceilings)

    def floor(tokens, name="mixtral-8x7b"):
        thin = batch(TINY[name], tokens, torch.device("cpu"), torch.float32)
        return layer._floor(setting, shape, [thin])

    ms, bound = floor(1)
    weights = 2 * 3 * 4096 * 14336 * 2  # two experts, two bytes
    assert bound == "memory" and ms == pytest.approx(weights / 4e12 * 1e3, rel=1e-3)
    ms, bound = floor(50_000)
    assert bound == "tensor cores"
    assert ms == pytest.approx(2 * 50_000 * 2 * 3 * 4096 * 14336 / 8e14 * 1e3)
    blind = Setting(dry=True, deadline=0.0, path=tmp_path / "rows")
    assert layer._floor(blind, shape, []) == (None, "the ceilings are not known")


def test_the_oracle_sees_a_wrong_layer():
    shape, cpu = TINY["olmoe"], torch.device("cpu")
    gate_up, down = native_weights(shape, cpu, torch.float32)
    one = batch(shape, 9, cpu, torch.float32, load="gaps")
    right = moe(one, gate_up, down)
    swapped = moe(one, gate_up.flip(0), down.flip(0))
    assert errors(right.float(), right)[1] < 1e-6
    assert errors(swapped, right)[1] > 0.5 and errors(torch.zeros_like(right), right)[1] == 1.0
    assert errors(right[:-1], right) == errors(right * float("nan"), right)
    assert errors(right[:-1], right)[0] == float("inf")


def test_the_whole_stays_under_four_minutes():
    longest = {}
    for section in SECTIONS:
        longest[section.wave] = max(longest.get(section.wave, 0), section.seconds)
    assert sum(longest.values()) <= TOTAL_SECONDS
    assert TOTAL_SECONDS + runner.GRACE_SECONDS < 240


# --- usage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        (("--section", "gat", "--dry-run", "--out", "x"), 2, "did you mean 'gate'?"),
        (("--tune", "500"), 2, "--tune (500)"),
        (("--dry-run",), 2, "--out"),
        (("--dry-run", "--out", "/proc/nothing/here"), 2, "--out (/proc/nothing/here)"),
        ((), 1, "sees no NVIDIA GPU"),
    ],
)
def test_bad_usage_is_one_sentence(capsys, monkeypatch, words, code, hint):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(list(words)) == code
    said = capsys.readouterr()
    assert said.out == "" and hint in said.err and said.err.count("\n") == 1


def test_the_command_line_has_the_same_script(workbench, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    workbench("bench", "gpu", "--out", tmp_path).assert_refused(1, "sees no NVIDIA GPU")
    monkeypatch.setattr(runner, "CHILD", "tests.workbench.gpu_child")
    words = ("bench", "gpu", "--dry-run", "--section", "gate", "--out", tmp_path)
    said = workbench(*words, "--json")
    assert said.code == 0 and json.loads(said.out)["sections"]["gate"]["error"] is None
    assert workbench(*words[:4], "correctness", *words[5:]).code == 1


# --- a full disk, a missing library, a killed runner ----------------------------------------------


def fail(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_found_before_anything_is_measured(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "fsync", fail)
    monkeypatch.setattr("workbench.bench.gpu.__main__.require_triton", lambda: None)
    assert main(["--dry-run", "--section", "gate", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert f"--out ({tmp_path}) cannot be written: No space left" in said.err
    assert said.out == "" and said.err.count("\n") == 1


def test_a_report_that_cannot_be_kept_is_printed_whole(capsys, monkeypatch, tmp_path):
    earlier = tmp_path / f"a-stand-in-{datetime.date.today().isoformat()}.json"
    earlier.write_text("earlier")
    monkeypatch.setattr(runner, "CHILD", "tests.workbench.gpu_child")
    monkeypatch.setattr(Path, "write_text", fail)
    assert main(["--dry-run", "--section", "gate", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["sections"]["gate"]["rows"]
    assert "cannot be kept" in said.err.splitlines()[-1]
    assert earlier.read_text() == "earlier" and list(tmp_path.iterdir()) == [earlier]


def test_without_triton_or_its_cache_one_sentence_says_so(capfd, monkeypatch, tmp_path, workbench):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    assert main([]) == 1
    assert "TRITON_CACHE_DIR" in capfd.readouterr().err
    workbench("kernels", "show", "grouped_gemm").assert_refused(1, "TRITON_CACHE_DIR")
    monkeypatch.setattr("workbench.bench.machine.find_spec", lambda name: None)
    assert main([]) == 1
    assert "triton is not installed" in capfd.readouterr().err
    workbench("bench", "gpu").assert_refused(1, "triton is not installed")


KILLED = """
from workbench.bench.gpu import runner
runner.CHILD = "tests.workbench.gpu_child"
start = runner._start
def told(*words):
    child = start(*words)
    print(child.process.pid, flush=True)
    return child
runner._start = told
runner.run(names=("large",), dry=True)
"""


def test_a_section_ends_with_a_runner_that_is_killed():
    with subprocess.Popen([sys.executable, "-c", KILLED], cwd=ROOT, stdout=subprocess.PIPE) as run:
        section = psutil.Process(int(run.stdout.readline()))
        time.sleep(0.5)
        assert section.is_running()
        run.kill()
    section.wait(timeout=30)
