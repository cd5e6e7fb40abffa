"""One model in three layouts gives one answer: the logits of the whole engine, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine import Engine, EngineConfig
from engine.config import ModelConfig
from engine.errors import CheckpointError
from tests.checkpoint.folders import SHAPE, Tensors, fused, random_tensors, stacked, write_folder

RAW = SHAPE | {"max_position_embeddings": 64}
CONFIG = ModelConfig.from_hf(RAW)
PROMPT = [3, 14, 15, 9, 2, 6, 5, 35, 8, 39, 0]


def tiny_tokenizer() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: CONFIG.vocab_size]
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def logits(folder: Path, tensors: Tensors, *, shards: int = 1) -> np.ndarray:
    write_folder(folder, tensors, raw=RAW, shards=shards, manifest=False)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    return Engine(EngineConfig(model=folder, num_blocks=8, num_threads=1)).logits(PROMPT)


def test_all_layouts_give_equal_logits_and_those_of_transformers(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    tensors = random_tensors(RAW)
    one = logits(tmp_path / "one", tensors, shards=3)
    assert one.shape == (len(PROMPT), CONFIG.vocab_size)
    assert np.array_equal(one, logits(tmp_path / "stacked", stacked(tensors, CONFIG)))
    assert np.array_equal(one, logits(tmp_path / "fused", fused(tensors, CONFIG), shards=2))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "one", dtype=torch.float32)
    with torch.no_grad():
        wanted = reference(torch.tensor([PROMPT])).logits[0].numpy()
    assert np.abs(one - wanted).max() < 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("matrix", ["gate_proj", "up_proj", "down_proj"])
def test_two_experts_swapped_in_one_matrix_change_the_logits(tmp_path: Path, matrix: str) -> None:
    tensors = random_tensors(RAW)
    one = logits(tmp_path / "one", tensors)
    first, second = (f"model.layers.0.mlp.experts.{e}.{matrix}.weight" for e in (0, 1))
    tensors[first], tensors[second] = tensors[second], tensors[first]
    assert not np.allclose(one, logits(tmp_path / "swapped", tensors))


def test_an_engine_refuses_a_damaged_folder_before_it_is_made(tmp_path: Path) -> None:
    tensors = random_tensors(RAW)
    write_folder(tmp_path / "model", tensors, raw=RAW, manifest=True)
    tiny_tokenizer().save(str(tmp_path / "model" / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: this file is not in the manifest"):
        Engine(EngineConfig(model=tmp_path / "model"))
