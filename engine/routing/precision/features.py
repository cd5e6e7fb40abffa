"""What is known of a token before a layer runs it: its class, and how the layer before saw it.

All are cheap: a look-up in a table of the vocabulary, the token's position, the two best logits
around the last chosen expert, the largest magnitude of its vector. Called by `step` and by the
calibration.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from torch import Tensor

Float = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]

CLASSES = ("special", "space", "punctuation", "digits", "letters", "begins_word", "broken")
"""Of tokens, by their text: `letters` go on within a word, `begins_word` has a space before them,
`broken` is no whole character."""


def classes_of(texts: Iterable[bytes]) -> UInt8:
    """Return the class of each token of a vocabulary, an index into `CLASSES`; (V,).

    ``[b"", b"  ", b"),", b"12", b"ing", b" the"]`` gives ``[0, 1, 2, 3, 4, 5]``.
    """
    return np.array([CLASSES.index(_class_of(text)) for text in texts], np.uint8)


def _class_of(raw: bytes) -> str:
    if not raw:
        return "special"
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return "broken"
    bare = text.strip()
    if not bare:
        return "space"
    if bare.isdigit():
        return "digits"
    if not any(character.isalnum() for character in bare):
        return "punctuation"
    return "begins_word" if text[0].isspace() else "letters"


def margins_of(logits_TE: Tensor, top_k: int) -> Float:
    """Return how far the last of the K best logits leads the next; inf when K is E; (T,).

    Of the product itself, before any policy. ``[[3, 1, 2, 0]]`` with K = 2 gives ``[1]``. A row
    that is not finite gives NaN, which suits no limit.
    """
    logits = logits_TE.float().cpu().numpy()
    num_experts = logits.shape[1]
    if top_k >= num_experts:
        return np.full(len(logits), np.inf, np.float32)
    ranked = np.partition(logits, (num_experts - top_k - 1, num_experts - top_k), axis=1)
    margins: Float = ranked[:, num_experts - top_k] - ranked[:, num_experts - top_k - 1]
    margins[~np.isfinite(logits.sum(axis=1))] = np.nan
    return margins


def ranges_of(x_TD: Tensor) -> Float:
    """Return the largest magnitude of each row, which sets the step of its INT8 numbers; (T,)."""
    if not len(x_TD):
        return np.zeros(0, np.float32)
    # Widened first: torch's largest of bf16 numbers takes five times as long.
    ranges: Float = x_TD.float().abs().amax(-1).cpu().numpy()
    return ranges


def within(x_TD: Tensor, limit: float) -> bool:
    """Say whether no magnitude is above `limit`; a number that is not one is never within.

    ``[[1, -3]]`` is within 3 and not within 2.
    """
    if not len(x_TD):
        return True
    low, high = x_TD.float().aminmax()
    return -limit <= low.item() and high.item() <= limit
