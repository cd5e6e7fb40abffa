"""The report's measures against worked examples, and its pages from small models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from engine.train import report
from engine.train.acceptance import Acceptance, agreement, count_accepted, greedy_text
from engine.train.export import export_model
from engine.train.network import DRAFT, Network
from engine.train.specialisation import (
    expert_counts,
    information_by_layer,
    masking_cost,
    mutual_information,
)
from engine.train.tables import acceptance_table, bits_table, history_table
from tests.train.conftest import TINY, scrambled


def test_mutual_information_of_the_worked_examples() -> None:
    assert mutual_information(np.array([[8, 0], [0, 8]])) == pytest.approx(1.0)
    assert mutual_information(np.array([[4, 4], [4, 4]])) == pytest.approx(0.0)
    assert mutual_information(np.array([[80, 0], [0, 8]])) == pytest.approx(1.0)
    assert mutual_information(np.eye(8) * 5) == pytest.approx(3.0)


def test_the_permutation_test_tells_specialists_from_chance() -> None:
    numbers = np.random.default_rng(0)
    chance = numbers.multinomial(64, [0.25] * 4, size=(3, 20))
    special = np.stack([numbers.multinomial(64, p, size=20) for p in np.eye(4)[:3] * 0.6 + 0.1])
    counts = {
        name: np.stack([chance[index], special[index]], axis=1)
        for index, name in enumerate(("a", "b", "c"))
    }
    by_chance, by_kind = information_by_layer(counts, num_shuffles=199)
    assert by_chance.p_value > 0.02 and by_chance.bits < 0.01
    assert by_kind.p_value == pytest.approx(1 / 200) and by_kind.bits > 0.3


def test_counts_cover_every_slot_of_every_window() -> None:
    windows = torch.randint(3, 4096, (20, 31), generator=torch.Generator().manual_seed(0))
    counts = expert_counts(Network(TINY), windows)
    assert counts.shape == (20, TINY.num_layers, TINY.num_experts)
    assert (counts.sum(-1) == 30 * TINY.top_k).all()


def test_masking_is_undone_and_costs_something(tokenizer: Tokenizer) -> None:
    network = Network(TINY)
    for parameter in network.parameters():
        parameter.data *= 3
    windows = torch.randint(3, 4096, (4, 31), generator=torch.Generator().manual_seed(0))
    bytes_V = torch.ones(4096, dtype=torch.int64)
    lost = list(masking_cost(network, {"en": windows}, bytes_V))
    assert [entry[:2] for entry in lost] == [(layer, e) for layer in range(2) for e in range(5)]
    assert any(abs(cost["en"]) > 1e-6 for *_, cost in lost)
    assert all(layer.moe.masked_expert is None for layer in network.layers)


def test_accepted_tokens_of_the_worked_example() -> None:
    counted = count_accepted(torch.tensor([[1, 1, 0, 1, 0, 0]]), num_proposed=2)
    assert counted == Acceptance(num_proposed=2, steps=2, accepted=3)
    assert (counted.rate, counted.tokens_per_step) == (0.75, 2.5)


def test_a_draft_equal_to_the_target_is_always_accepted_and_another_is_not() -> None:
    target, other = (scrambled(Network(TINY, seed=1)) for _ in range(2))
    other.norm.weight.data.neg_()
    prompts = torch.randint(3, 4096, (3, 8), generator=torch.Generator().manual_seed(0))
    # In fp32: in bf16 the logits of untrained models have ties that other shapes break otherwise.
    text = greedy_text(target, prompts, 12, torch.float32)
    assert text.shape == (3, 20)
    assert agreement(target, text, 8, torch.float32).float().mean() > 0.9
    assert agreement(other, text, 8, torch.float32).float().mean() < 0.5


def test_tables_show_means_and_totals() -> None:
    assert "| mean | 2.000 |" in bits_table({"x": {"en": 1.0, "de": 3.0}})
    counted = Acceptance(num_proposed=2, steps=10, accepted=10)
    other = Acceptance(num_proposed=2, steps=30, accepted=0)
    table = acceptance_table({"en": [counted], "de": [other]}, [2])
    assert "| en | 0.50 | 2.00 |" in table and "| all | 0.12 | 1.25 |" in table


def test_the_history_keeps_its_last_check() -> None:
    checks = [{"step": n, "tokens": n * 10**6, "bits_per_byte": {"en": 2.0}} for n in range(1, 30)]
    rows = history_table(checks).split("\n")[2:]
    assert 6 <= len(rows) <= 9
    assert rows[-1].startswith("| 29 | 29.0 |")


def test_the_command_writes_both_pages(
    tmp_path: Path,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    short: dict[str, object] = {
        "ALL": 1,
        "COUNT_WINDOWS": 2,
        "MASK_WINDOWS": 1,
        "ACCEPTANCE_TEXTS": 2,
        "PROMPT_TOKENS": 8,
        "NEW_TOKENS": 6,
        "SAMPLE_TOKENS": 3,
    }
    for name, value in short.items():
        monkeypatch.setattr(report, name, value)
    monkeypatch.setattr(report, "token_streams", _first_tokens)
    from dataclasses import replace

    tiny = replace(TINY, max_position_embeddings=512)
    for name, config in (("moe", tiny), ("draft", DRAFT)):
        folder = tmp_path / f"polyglot-{name}"
        export_model(Network(config).state_dict(), config, tokenizer, folder)
    assert report.main(["--models", str(tmp_path)]) == 0
    moe = (tmp_path / "polyglot-moe" / "README.md").read_text(encoding="utf-8")
    draft = (tmp_path / "polyglot-draft" / "README.md").read_text(encoding="utf-8")
    assert "globally nonsense" in moe and "globally nonsense" in draft
    assert "| 1, 4 |" in moe and "Layer 1" in moe
    assert "n=4 acceptance" in draft
    capsys.readouterr()
    assert report.main(["--models", str(tmp_path / "none")]) == 1
    assert "does not exist" in capsys.readouterr().err


def _first_tokens(tokenizer: Tokenizer, split: str) -> dict[str, np.ndarray]:
    from engine.train.batches import token_stream
    from engine.train.data import DOMAINS

    stream = token_stream(tokenizer, "num", split)
    return {domain: stream[600 * index :][:600] for index, domain in enumerate(DOMAINS)}
