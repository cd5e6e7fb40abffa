"""Ranks for long: hundreds of tables, hundreds of idle steps, twenty deaths in a row."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.folders import random_tensors, write_folder
from tests.checkpoint.test_layout_logits import RAW, tiny_tokenizer
from workbench import paths
from workbench.bench import rebalance, recovery


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_500_tables_and_1000_idle_steps_leave_every_answer_right_and_memory_flat(
    tmp_path: Path,
) -> None:
    raw = RAW | {"num_experts": 6}
    folder = write_folder(tmp_path / "tiny", random_tensors(raw), raw=raw, manifest=False)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    report = rebalance.run(folder)
    assert report["rebalances"] == 501 and not report["given_up"], report
    assert report["completions"] > 100 and report["wrong_hashes"] == 0, report
    assert report["equal_collectives"], report
    assert report["flat"], report
    assert report["read_bytes"] == 0 < report["moved_bytes"], report


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_twenty_ranks_in_a_row_are_lost_and_no_request(how: str) -> None:
    report = recovery.run(paths.model_folder(paths.DEFAULT_MODEL), how=how)
    assert len(report["rows"]) == 20 and report["same_output"], report
    assert report["within_bound"], report
