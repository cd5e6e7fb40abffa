"""`workbench kernels`: the registry with its reasons, and what a kernel compiles to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_every_operation_has_one_kernel_taken_on_each_device(workbench):
    report = workbench("kernels", "--device", "cpu", "--json").json
    taken = {}
    for row in report["rows"]:
        assert row["reason"] and row["device"] == "cpu"
        taken.setdefault(row["op"], []).append(row["taken"])
    assert {"topk", "permute", "grouped_mlp", "combine", "linear"} <= set(taken)
    assert all(any(several) for several in taken.values())


def test_deterministic_mode_takes_other_kernels(workbench):
    def linear(*words):
        rows = workbench("kernels", "--device", "cpu", *words, "--json").json["rows"]
        return {row["name"] for row in rows if row["op"] == "linear" and row["taken"]}

    assert linear("--deterministic") == {"tiled"}
    assert "tiled" not in linear()


@pytest.mark.parametrize("columns", [80, 100])
def test_the_table_for_people_fits_the_terminal_and_marks_what_is_taken(
    workbench, monkeypatch, columns
):
    monkeypatch.setenv("COLUMNS", str(columns))
    said = workbench("kernels")
    lines = said.out.splitlines()
    assert said.code == 0 and max(map(len, lines)) <= columns
    cuda = lines.index("on cuda")
    assert lines[0] == "on cpu" and lines[1].split() == ["op", "kernel", "dtype", "reason"]
    for device in (lines[:cuda], lines[cuda:]):
        assert sum(line.startswith("*") for line in device[:-2]) >= 9, "one for each operation"
    folded = " ".join(said.out.split())
    assert folded.count("for fp32 matrices above 2 MB and all bf16 ones") == 1


@pytest.mark.parametrize(
    ("words", "hints"),
    [
        (("--device", "gpu"), ("--device (gpu)", "cpu, cuda")),
        (("--dtype", "bfloat"), ("did you mean 'bfloat16'",)),
        (("show", "gruped_gemm"), ("did you mean 'grouped_gemm'",)),
        (("show", "combine", "--target", "sm90"), ("did you mean 'sm_90'",)),
        (("show", "combine", "--stage", "sas"), ("did you mean 'sass'",)),
        (("show", "combine", "--dtype", "int4"), ("--dtype (int4)",)),
        (("show", "combine", "--variant", "combine.bf16"), ("variant 'combine.bf16'",)),
        (("show", "grouped_gemm", "--dtype", "fp8", "--target", "sm_80"), ("sm_80",)),
        (("show",), ("NAME",)),
    ],
)
def test_bad_usage_is_one_sentence_that_names_what_is_allowed(workbench, words, hints):
    pytest.importorskip("triton")
    workbench("kernels", *words).assert_refused(2, *hints)


def test_show_reports_resources_and_every_stage(workbench):
    pytest.importorskip("triton")
    words = ("kernels", "show", "grouped_gemm", "--dtype", "bf16", "--json")
    report = workbench(*words).json
    found = report["resources"]
    assert report["target"] == "sm_90" and report["variant"] in report["variants"]
    assert found["spill_loads"] == found["spill_stores"] == found["stack_bytes"] == 0
    assert 0 < found["registers"] <= 255
    assert 0 < found["shared_bytes"] <= found["shared_limit_bytes"] == 232448
    assert any(name.startswith("HGMMA") for name in found["tensor_core_instructions"])
    signs = {"ttir": "tt.dot", "ttgir": "ttg.", "ptx": "wgmma.mma_async"}
    for stage, sign in signs.items():
        assert sign in workbench(*words, "--stage", stage).json["text"]


def test_show_for_people_says_what_the_numbers_are(workbench):
    pytest.importorskip("triton")
    said = workbench("kernels", "show", "combine", "--target", "sm_80")
    assert said.code == 0 and said.err == ""
    for word in ("registers a thread", "spills", "shared memory", "other variants", "none"):
        assert word in said.out


def test_without_triton_show_says_so_in_one_sentence(workbench, monkeypatch):
    monkeypatch.setattr("engine.kernels.inspect.find_spec", lambda name: None)
    workbench("kernels", "show", "combine").assert_refused(1, "triton is not installed")


def test_an_interpreting_process_is_told_to_unset_it(tmp_path):
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "workbench", "kernels", "show", "combine"],
        cwd=ROOT,
        env={"TRITON_INTERPRET": "1", "HOME": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("workbench: TRITON_INTERPRET is set")
