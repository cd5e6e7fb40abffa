"""Trains the byte-level tokenizer of both bundled models and writes its files.

Every digit is a token of its own, so that arithmetic is written the same way everywhere. Encoding
puts `<|bos|>` in front; training text has `<|eos|>` after every document, so generation can end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from engine.train.data import CORPUS, DOMAINS, documents

VOCAB_SIZE = 4096
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2
MAX_BYTES = {"math": 1_000_000, "num": 200_000}
"""Formulas and problems repeat a few symbols; more of them would only crowd out words."""


def train_tokenizer(folder: Path = CORPUS, vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train a byte-pair tokenizer on the train split of every domain."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(folder), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json and the settings without which transformers builds another one."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=2) + "\n", encoding="utf-8"
    )


def _texts(folder: Path) -> Iterator[str]:
    for domain in DOMAINS:
        left = MAX_BYTES.get(domain, 3_000_000)
        for document in documents(domain, "train", folder):
            left -= len(document.text.encode())
            if left < 0:
                break
            yield document.text
