"""Ranks for long: hundreds of tables and idle steps, twenty deaths in a row, many shapes."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from engine import Engine, EngineConfig, SamplingParams
from tests.checkpoint.folders import random_tensors, write_folder
from tests.checkpoint.test_layout_logits import RAW, tiny_tokenizer
from workbench import paths
from workbench.bench import rebalance, recovery


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_500_tables_and_1000_idle_steps_leave_every_answer_right_and_memory_flat(
    tmp_path: Path,
) -> None:
    report = rebalance.run(tiny(tmp_path, 6))
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


def tiny(tmp_path: Path, experts: int, *, powers: bool = False) -> Path:
    """Write a tiny model; with `powers` expert i is 2^i times as large."""
    raw = RAW | {"num_experts": experts}
    tensors = random_tensors(raw)
    if powers:
        for name, tensor in tensors.items():
            if ".experts." in name:
                tensor *= 2.0 ** int(name.split(".experts.")[1].split(".")[0])
    folder = write_folder(tmp_path / "tiny", tensors, raw=raw, manifest=False)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def hashes(engine: Engine) -> list[str | None]:
    prompts = [[3 + turn, 9, 17, 5 + turn] for turn in range(6)]
    done = engine.generate(prompts, SamplingParams(max_tokens=5, ignore_eos=True))
    assert all(one.logits_sha256 for one in done)
    return [one.logits_sha256 for one in done]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("experts", "ranks"), [(30, 8), (5, 3), (2, 4)])
def test_uneven_shares_compute_what_one_process_does(
    tmp_path: Path, experts: int, ranks: int
) -> None:
    folder = tiny(tmp_path, experts)
    options = {"deterministic": True, "hash_logits": True, "num_blocks": 16}
    with closing(Engine(EngineConfig(model=folder, **options))) as one:
        wanted = hashes(one)
    with closing(Engine(EngineConfig(model=folder, num_ranks=ranks, **options))) as many:
        slots = np.bincount(many.table.rank_of_phy, minlength=ranks)
        assert slots.max() - slots.min() <= 1 and slots.sum() == experts
        assert hashes(many) == wanted


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_scales_of_int8_experts_travel_with_them(tmp_path: Path) -> None:
    """Expert i is 2^i times as large, so that a scale left behind is off by a factor."""
    folder = tiny(tmp_path, 6, powers=True)
    config = EngineConfig(
        model=folder, num_ranks=2, precision="int8", hash_logits=True, num_blocks=16
    )
    with closing(Engine(config)) as engine:
        wanted = hashes(engine)
        owners = engine.table.rank_of_phy.copy()
        for turn in range(50):
            first, second = turn % 3, 3 + turn % 2
            owners[[first, second]] = owners[[second, first]]
            table = engine.table.moved(owners)
            engine.control.publish_table(table)
            while engine.table.version < table.version:
                engine.step()
            assert engine.control.state()["canary"]["equal"]
            assert hashes(engine) == wanted, turn
