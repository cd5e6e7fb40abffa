"""Choose the next token of each sequence from its logits.

Randomness is a function of (seed, position) alone, so a sequence draws the same tokens whatever
else is in the batch and whatever was preempted or run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.config import SamplingParams


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities at one position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The best (token id, log-probability) pairs, best first."""


def sample(
    logits_BV: Tensor,
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    positions: Sequence[int],
) -> list[int]:
    """Return one token per row.

    Args:
        logits_BV: (B, V) fp32.
        params: one per row; temperature 0 takes the most likely token (the lowest id of equals).
        seeds: one per row, 0 or more.
        positions: one per row: the position the new token will have.
    """
    tokens: list[int] = logits_BV.argmax(dim=-1).tolist()
    for row, row_params in enumerate(params):
        if row_params.temperature > 0:
            tokens[row] = _draw(logits_BV[row], row_params, seeds[row], positions[row])
    return tokens


def logprobs(logits_V: Tensor, token_id: int, count: int) -> Logprobs:
    """Return the log-probability of a token and the `count` best ones, of unscaled logits."""
    logprobs_V = torch.log_softmax(logits_V, dim=-1)
    best = torch.topk(logprobs_V, count)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return Logprobs(token_id, float(logprobs_V[token_id]), tuple(pairs))


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that belongs to (seed, position); Philox, counter-based.

    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
    """
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


def _draw(logits_V: Tensor, params: SamplingParams, seed: int, position: int) -> int:
    """Draw from the renormalised head of the distribution that top-k and top-p keep."""
    ranked = torch.sort(logits_V / params.temperature, descending=True, stable=True)
    if params.top_k:
        ranked = (ranked.values[: params.top_k], ranked.indices[: params.top_k])  # type: ignore[assignment]
    values, indices = ranked
    cumulative = torch.softmax(values.double(), dim=-1).cumsum(-1)
    kept = int(torch.searchsorted(cumulative, params.top_p)) + 1
    cumulative = cumulative[:kept]
    target = uniform(seed, position) * float(cumulative[-1])
    chosen = min(int(torch.searchsorted(cumulative, target, right=True)), len(cumulative) - 1)
    return int(indices[chosen])
