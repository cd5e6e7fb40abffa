"""Accept proposals by chance: more of them stand, in the target's distribution, in another text.

A proposal drawn from the draft's distribution q is accepted with probability min(1, p / q), p being
the target's; the first that is not is replaced by a draw from what p has above q. Every token then
has the target's distribution exactly, with temperature, top-k and top-p as the sampler cuts them.
But the text depends on what was proposed, so the same seed gives another text than without a draft,
and with adaptive lengths perhaps another one each time.

Source: Y. Leviathan et al., Fast inference from transformers via speculative decoding (arXiv
2211.17192), algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from torch import Tensor

from engine.config import SamplingParams
from engine.model.sampler import Array, distribution, uniform
from engine.routing.speculation import Thought
from engine.runtime.scheduler import Chunk

PROPOSING, ACCEPTING, REPLACING = 1, 2, 3
"""Streams of random numbers beside the sampler's own."""


def draw_proposal(
    logits_V: Array, params: SamplingParams, seed: int, position: int
) -> tuple[int, Array]:
    """Draw a token from the draft's distribution; returns it and the (V,) distribution."""
    shares_V = distribution(logits_V, params)
    return _draw(shares_V, uniform(seed, position, PROPOSING)), shares_V


def redraw(chunks: Iterable[Chunk], tokens: list[int], logits_BV: Tensor) -> None:
    """Replace what the target drew after drawn proposals by what this rule makes of them.

    Args:
        chunks: of the step.
        tokens: one for each row that drew a token, in order; changed where proposals were drawn.
        logits_BV: (B, V) of those rows.
    """
    row = 0
    for chunk in chunks:
        if not chunk.samples:
            continue
        if chunk.proposal is not None and chunk.num_drafts:
            sequence, thoughts = chunk.sequence, chunk.proposal.thoughts[: chunk.num_drafts]
            if thoughts[0].shares_V is not None:
                rows_NV = logits_BV[row : row + len(thoughts)].cpu().numpy()
                first = len(sequence.token_ids)
                kept = _settle(thoughts, rows_NV, sequence.params, sequence.seed, first)
                tokens[row : row + len(kept)] = kept
        row += 1 + chunk.num_drafts


def _settle(
    thoughts: list[Thought], logits_NV: Array, params: SamplingParams, seed: int, first: int
) -> list[int]:
    """Return the accepted proposals, and the replacement of the first that is not."""
    kept: list[int] = []
    for place, (thought, logits_V) in enumerate(zip(thoughts, logits_NV, strict=True)):
        assert thought.shares_V is not None, "the proposal was not drawn"
        token_id, position = thought.token_id, first + place
        wanted_V = distribution(logits_V, params)
        ratio = wanted_V[token_id] / thought.shares_V[token_id]
        if uniform(seed, position, ACCEPTING) < ratio:
            kept.append(token_id)
            continue
        left_V = np.maximum(wanted_V - thought.shares_V, 0.0)
        kept.append(_draw(left_V, uniform(seed, position, REPLACING)))
        break
    return kept


def _draw(weights_V: Array, share: float) -> int:
    """Return the token at `share` (0 to 1) of the weights' sum; never one of weight 0."""
    mass = np.cumsum(weights_V)
    place = int(np.searchsorted(mass, share * mass[-1], side="right"))
    return min(place, int(np.flatnonzero(weights_V)[-1]))
