"""A draft learns from what its target writes, and the labels are what the target thought."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.train import distil as module
from engine.train.batches import SHARES, Stream
from engine.train.distil import distil, soft_label_loss
from engine.train.network import Network
from engine.train.written import KEPT, Written, draw_prompts, write
from tests.train.conftest import TINY, scrambled

DENSE = replace(TINY, family="qwen3", num_experts=0, top_k=0, moe_intermediate_size=0)
PROMPT, NEW = 6, 10


@pytest.fixture(scope="module")
def target() -> Network:
    return scrambled(Network(TINY)).requires_grad_(False)


@pytest.fixture(scope="module")
def texts(target: Network) -> Written:
    prompts = torch.randint(10, 400, (12, PROMPT), generator=torch.Generator().manual_seed(1))
    return write(target, prompts, NEW)


def test_the_text_is_the_targets_own_and_the_labels_say_so(target: Network, texts: Written) -> None:
    ids, likely, weights = texts.batch(torch.arange(12))
    assert texts.ids_NT.shape == (12, PROMPT + NEW)
    assert likely.shape == weights.shape == (12, PROMPT + NEW - 1, KEPT)
    assert torch.equal(likely[:, PROMPT - 1 :, 0], texts.ids_NT[:, PROMPT:].long())
    assert torch.allclose(weights.sum(-1), torch.ones(12, PROMPT + NEW - 1), atol=1e-2)
    # Without a cache, in one pass over the whole text, the target thinks much the same.
    logits, _ = target(ids, torch.float32)
    agrees = logits.argmax(-1) == likely[:, :, 0]
    assert agrees.float().mean() > 0.85


def test_a_text_with_a_forgotten_cache_would_be_caught(target: Network, texts: Written) -> None:
    ids, likely, _ = texts.batch(torch.arange(12))
    logits = torch.cat([target(ids[:, at : at + 1], torch.float32)[0] for at in range(15)], dim=1)
    assert (logits.argmax(-1) == likely[:, :, 0]).float().mean() < 0.85


def test_the_loss_falls_and_a_seed_repeats_the_run(
    texts: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TEXTS_PER_STEP", 8)
    drafts = [Network(DENSE, seed=2).train() for _ in range(2)]
    before = soft_label_loss(drafts[0], *texts.batch(torch.arange(12))).item()
    for number, draft in enumerate(drafts):
        progress = tmp_path / f"{number}.jsonl"
        distil(draft, texts, 40, 5, progress, lambda line: None, compiled=False)
    after = [soft_label_loss(draft, *texts.batch(torch.arange(12))).item() for draft in drafts]
    assert after[0] == after[1] < before - 0.5
    assert len((tmp_path / "0.jsonl").read_text(encoding="utf-8").splitlines()) == 2


def test_texts_come_back_from_a_file(texts: Written, tmp_path: Path) -> None:
    texts.save(tmp_path / "written.pt")
    again = Written.read(tmp_path / "written.pt")
    assert torch.equal(again.weights_NTK, texts.weights_NTK)
    assert torch.equal(again.ids_NT, texts.ids_NT)


def test_prompts_are_drawn_by_shares_and_seed(streams: dict[str, Stream]) -> None:
    one, other = (draw_prompts(streams, SHARES, 40, 8, seed) for seed in (0, 1))
    assert torch.equal(one, draw_prompts(streams, SHARES, 40, 8, 0))
    assert not torch.equal(one, other) and (one[:, 0] == 0).all()
    numbers = draw_prompts(
        streams, SHARES | {name: 0.0 for name in SHARES if name != "num"}, 9, 8, 0
    )
    assert ((numbers[:, 1:] >= 360) & (numbers[:, 1:] < 400)).all()
