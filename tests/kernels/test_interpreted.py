"""Runs the tests of the Triton kernels in a process that interprets them on the CPU.

Triton decides when it is imported whether it interprets or compiles, so one process cannot do both.
By hand: `TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreted`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "interpreted"


@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("triton") is None, reason="triton has no wheel for this platform")
def test_every_test_of_the_interpreted_kernels_passes_and_none_is_skipped() -> None:
    child = run_pytest(FOLDER)
    print(child.stdout)
    assert child.returncode == 0, child.stdout + child.stderr
    counts = outcomes(child.stdout)
    assert counts.pop("passed") > 0 and not counts, counts


def test_a_folder_without_tests_does_not_count_as_passed(tmp_path: Path) -> None:
    child = run_pytest(tmp_path)
    assert child.returncode != 0
    assert "passed" not in outcomes(child.stdout)


def run_pytest(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the tests of `folder` in a child, without coverage, which would take twice as long."""
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", folder)
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def outcomes(output: str) -> dict[str, int]:
    """Return how many tests passed, failed, were skipped, … by pytest's last line."""
    last = output.strip().splitlines()[-1]
    return {word: int(count) for count, word in re.findall(r"(\d+) ([a-z]+)", last)}
