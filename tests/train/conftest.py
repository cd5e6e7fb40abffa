"""What the training tests share: a tiny model, a tiny corpus, the shipped tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from engine.config import ModelConfig
from engine.train.batches import Stream
from engine.train.data import CORPUS, DOMAINS, Document, corpus_file, write_documents
from engine.train.network import MODELS, Network

MOE_FOLDER = CORPUS.parent / "models" / "polyglot-moe"

TINY = ModelConfig(
    family="qwen3_moe",
    vocab_size=4096,
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=32,
    moe_intermediate_size=24,
    num_experts=5,
    top_k=2,
    tie_word_embeddings=True,
    max_position_embeddings=64,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
)


def scrambled(network: Network) -> Network:
    """Give every parameter, the norms' too, a value of its own."""
    generator = torch.Generator().manual_seed(3)
    for parameter in network.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = (parameter.data + 0.1 * noise).bfloat16().float()
    return network.eval()


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    """A tiny MoE, known to the trainer as `tiny`."""
    monkeypatch.setitem(MODELS, "tiny", TINY)
    return TINY


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The shipped tokenizer."""
    return Tokenizer.from_file(str(MOE_FOLDER / "tokenizer.json"))


@pytest.fixture(scope="session")
def streams() -> dict[str, Stream]:
    """Short, predictable token streams, one per domain."""
    return {
        domain: np.tile(np.arange(40, dtype=np.int64) + 10 + 50 * index, 30)
        for index, domain in enumerate(DOMAINS)
    }


@pytest.fixture
def make_corpus(tmp_path: Path) -> Callable[[], Path]:
    """Write a corpus of a few short documents and return its folder."""

    def make() -> Path:
        folder = tmp_path / "corpus"
        folder.mkdir()
        for domain in DOMAINS:
            documents = [
                Document(
                    source="invented",
                    key=f"{domain}/{number}",
                    split="heldout" if number % 4 == 0 else "train",
                    text=f"{domain} says the same words {number} times. " * 60,
                )
                for number in range(12)
            ]
            write_documents(corpus_file(domain, folder), documents)
        return folder

    return make
