"""Choose the next token of each sequence from its logits.

Randomness is a function of (seed, position) alone, so a sequence draws the same tokens whatever
else is in the batch and whatever was preempted or run again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.config import SamplingParams

Array = np.ndarray[Any, Any]


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
        params: one per row; temperature 0 takes the most likely token (the lowest id of equals),
            and so does a row whose largest tempered logit is no finite number.
        seeds: one per row, 0 or more.
        positions: one per row: the position the new token will have.
    """
    tokens = []
    with np.errstate(all="ignore"):  # a tiny temperature may take a logit to infinity
        for row, logits_V in enumerate(logits_BV.cpu().numpy()):
            token = int(logits_V.argmax())
            if params[row].temperature > 0:
                scaled_V = logits_V / np.float32(params[row].temperature)
                if math.isfinite(scaled_V.max()):
                    token = _draw(scaled_V, params[row], uniform(seeds[row], positions[row]))
            tokens.append(token)
    return tokens


def logprobs(logits_V: Tensor, token_id: int, count: int) -> Logprobs:
    """Return the log-probability of a token and the `count` best ones, of unscaled logits."""
    logprobs_V = torch.log_softmax(logits_V, dim=-1)
    best = torch.topk(logprobs_V, count)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return Logprobs(token_id, float(logprobs_V[token_id]), tuple(pairs))


def distribution(logits_V: Array, params: SamplingParams) -> Array:
    """Return the (V,) float64 probabilities that `sample` draws a row's token by.

    Logits [1, 3, 2, 3] with temperature 1 and top-k 2 give [0, .5, 0, .5]. A row that `sample`
    takes the most likely token of has probability 1 there.
    """
    shares_V = np.zeros(len(logits_V))
    with np.errstate(all="ignore"):
        scaled_V = logits_V / np.float32(params.temperature)
    if params.temperature == 0 or not math.isfinite(scaled_V.max()):
        shares_V[int(logits_V.argmax())] = 1.0
        return shares_V
    if not 0 < params.top_k < len(scaled_V) and params.top_p == 1.0:
        np.exp(scaled_V.astype(np.float64) - scaled_V.max(), out=shares_V)
        shares_V /= shares_V.sum()
        return shares_V
    order = np.argsort(-scaled_V, kind="stable")
    if 0 < params.top_k < len(order):
        order = order[: params.top_k]
    mass = np.exp(scaled_V[order].astype(np.float64) - scaled_V[order[0]])
    mass /= mass.sum()
    kept = order[: np.searchsorted(np.cumsum(mass), params.top_p) + 1]
    shares_V[kept] = mass[: len(kept)] / mass[: len(kept)].sum()
    return shares_V


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """Return the number in [0, 1) that belongs to (seed, position); Philox, counter-based.

    Each `stream` has numbers of its own; 0 is the sampler's.

    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
    """
    counter = position + (stream << 128)
    return float(np.random.Philox(key=seed, counter=counter).random_raw() >> 11) * 2.0**-53


def _draw(scaled_V: Array, params: SamplingParams, share: float) -> int:
    """Return the token at `share` (0 to 1) of the mass that top-k and top-p keep.

    Tokens stand in the order of their logits, the lowest id first among equals. Only values are
    sorted, which numpy does with vector instructions (17 us for 4096, where a stable sort that
    carries the ids along takes 440); the id is looked up last:

        scaled_V = [1, 3, 2, 3]    values = [3, 3, 2, 1]
        rank 1 is the second of the equals that begin at rank 0: the second 3, id 3
    """
    head = scaled_V
    if 0 < params.top_k < len(scaled_V):
        head = np.partition(scaled_V, -params.top_k)[-params.top_k :]
    values = np.sort(head)[::-1]
    mass = np.cumsum(np.exp(values.astype(np.float64) - values[0]))
    mass /= mass[-1]
    mass = mass[: np.searchsorted(mass, params.top_p) + 1]
    target = share * mass[-1]
    rank = min(int(np.searchsorted(mass, target, side="right")), len(mass) - 1)
    first_of_equals = int(np.argmax(values == values[rank]))
    return int(np.flatnonzero(scaled_V == values[rank])[rank - first_of_equals])
