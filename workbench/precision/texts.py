"""The text that formats are measured on: windows of every domain of the bundled corpus.

Thresholds are found on the training split and judged on what was held out.
"""

from __future__ import annotations

import numpy as np

from engine.model.tokenizer import Tokenizer
from engine.train.batches import evaluation_windows
from engine.train.data import DOMAINS, documents
from engine.train.tokenizer import EOS_ID

SPREAD = 4
"""Windows are spread over so many times as much text, so that they are not of one document."""


def windows(
    tokenizer: Tokenizer, split: str, per_domain: int, length: int
) -> dict[str, list[list[int]]]:
    """Return by domain up to `per_domain` windows of token ids, each one longer than `length`.

    Raises:
        ConfigError: the corpus is missing.
    """
    return {
        domain: evaluation_windows(
            _stream(tokenizer, domain, split, SPREAD * per_domain * (length + 1)),
            per_domain,
            length,
        ).tolist()
        for domain in DOMAINS
    }


def _stream(tokenizer: Tokenizer, domain: str, split: str, num_tokens: int) -> np.ndarray:
    """Return the first documents' ids, each closed by the end of text, as many as are asked for."""
    ids: list[int] = []
    for document in documents(domain, split):
        ids += [*tokenizer.encode(document.text), EOS_ID]
        if len(ids) >= num_tokens:
            break
    return np.array(ids, np.int64)
