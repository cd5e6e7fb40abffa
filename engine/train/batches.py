"""Token streams per domain, and the windows that training and evaluation cut from them.

A stream is every document of a domain and split in turn: `<|bos|> text <|eos|>`. Every window
starts with `<|bos|>`, wherever it was cut, because every prompt does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from engine.train.data import CORPUS, DOMAINS, documents
from engine.train.tokenizer import BOS_ID, EOS_ID, PAD_ID

Stream = NDArray[np.int64]

SHARES = {
    "en": 0.16,
    "de": 0.14,
    "fr": 0.14,
    "es": 0.13,
    "zh": 0.14,
    "py": 0.14,
    "math": 0.09,
    "num": 0.06,
}
"""How often a training window comes from a domain."""


def token_stream(tokenizer: Tokenizer, domain: str, split: str, folder: Path = CORPUS) -> Stream:
    """Return one domain's tokens [n], each document closed by `<|eos|>`."""
    texts = [document.text for document in documents(domain, split, folder)]
    ids: list[int] = []
    for encoding in tokenizer.encode_batch_fast(texts):
        ids += encoding.ids
        ids.append(EOS_ID)
    return np.array(ids, dtype=np.int64)


def token_streams(tokenizer: Tokenizer, split: str, folder: Path = CORPUS) -> dict[str, Stream]:
    """Return the stream of every domain."""
    return {domain: token_stream(tokenizer, domain, split, folder) for domain in DOMAINS}


def training_batch(
    streams: Mapping[str, Stream], step: int, seed: int, batch_size: int, context: int
) -> Tensor:
    """Draw windows [batch_size, context + 1] for one step.

    Drawn from (seed, step) alone: a resumed run sees the batches an uninterrupted one would.
    """
    numbers = np.random.default_rng((seed, step))
    names = list(streams)
    shares = np.array([SHARES[name] for name in names])
    chosen = numbers.choice(len(names), size=batch_size, p=shares / shares.sum())
    windows = np.empty((batch_size, context + 1), dtype=np.int64)
    for window, index in zip(windows, chosen, strict=True):
        stream = streams[names[index]]
        start = numbers.integers(0, len(stream) - context)
        window[:] = stream[start : start + context + 1]
    windows[:, 0] = BOS_ID
    return torch.from_numpy(windows)


def evaluation_windows(stream: Stream, num_windows: int, context: int) -> Tensor:
    """Return up to `num_windows` windows [n, context + 1], spread evenly and never overlapping."""
    possible = max(1, (len(stream) - 1) // context)
    starts = np.linspace(0, possible - 1, min(num_windows, possible)).astype(int) * context
    windows = np.stack([stream[start : start + context + 1] for start in starts])
    windows[:, 0] = BOS_ID
    return torch.from_numpy(windows)


def token_bytes(tokenizer: Tokenizer) -> Tensor:
    """Return the bytes of text each token stands for [V]; 0 for the special ones."""
    specials = (BOS_ID, EOS_ID, PAD_ID)
    # In the byte-level alphabet one character is one byte.
    sizes = [
        0 if token in specials else len(tokenizer.id_to_token(token) or "")
        for token in range(tokenizer.get_vocab_size())
    ]
    return torch.tensor(sizes)
