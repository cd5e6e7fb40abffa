"""How torch computes inside an engine's step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.config import EngineConfig


@contextmanager
def computing(config: EngineConfig) -> Iterator[None]:
    """Run torch without autograd and with the engine's number of threads; then as before."""
    threads = 1 if config.deterministic else config.num_threads
    before = torch.get_num_threads()
    if threads and threads != before:
        torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            yield
    finally:
        if threads and threads != before:
            torch.set_num_threads(before)
