from __future__ import annotations

import pytest

from engine.errors import RequestError
from workbench import paths
from workbench.bench.speculation import run

MODEL, DRAFT = paths.model_folder("polyglot-moe"), paths.model_folder("polyglot-draft")


def test_the_report_has_a_row_for_each_domain_and_one_definition():
    report = run(MODEL, DRAFT, domains=("num",), prompts=1, tokens=64, rounds=1, threads=1)
    row, misfit = report["rows"]
    assert misfit["domain"] == "num, a misfit draft" and misfit["same_text"] == "1 of 1"
    assert misfit["accepted"] <= 2
    assert row["domain"] == "num" and row["same_text"] == "1 of 1"
    assert row["tokens_per_step"] == pytest.approx(row["accepted"] / row["steps"] + 1, abs=1e-3)
    assert row["steps"] + row["accepted"] == 64
    assert row["ratio"] > 0 and row["plain_tokens_per_second"] > 0
    assert "accepted / proposed" in report["definition"] and report["label"] == "measured"


def test_too_few_tokens_are_refused():
    with pytest.raises(RequestError, match=r"tokens \(20\) must be at least 64"):
        run(MODEL, DRAFT, tokens=20)
