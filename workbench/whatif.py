"""What if the gate had been told otherwise? One request twice: as it is, and under a policy.

Both passes run the whole prompt on an engine that does nothing else, so no other request sees the
policy, and it is taken back afterwards. Compared is what the model says comes next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from workbench.policy import Policy

if TYPE_CHECKING:
    from engine import Engine

Float64 = npt.NDArray[np.float64]

KL_FORMULA = "sum over next tokens of p ln(p / q), in nats: p without the policy, q under it"
NUM_TOP = 5


def what_if(engine: Engine, token_ids: Sequence[int], token: int, policy: Policy) -> dict[str, Any]:
    """Compare the distributions of the token after `token`, and of the one after the prompt.

    The engine is left as it was.

    Raises:
        ConfigError: the model is dense, an expert or a layer does not exist, or too few are left.
    """
    kept = engine.control.policy
    before_TV = engine.logits(token_ids)
    try:
        policy.apply(engine)
        after_TV = engine.logits(token_ids)
    finally:
        engine.control.set_policy(kept)
    return {
        "kl_formula": KL_FORMULA,
        "after_token": _compared(engine, token, before_TV[token], after_TV[token]),
        "after_prompt": _compared(engine, len(token_ids) - 1, before_TV[-1], after_TV[-1]),
    }


def kl_divergence(p_V: Float64, q_V: Float64) -> float:
    """Return `KL_FORMULA`; a token that is impossible before adds nothing.

    p = [1/2, 1/2] and q = [3/4, 1/4]: (ln(2/3) + ln 2) / 2 = 0.1438.
    """
    there = p_V > 0
    return max(0.0, float((p_V[there] * np.log(p_V[there] / q_V[there])).sum()))


def _compared(
    engine: Engine, position: int, before_V: np.ndarray, after_V: np.ndarray
) -> dict[str, Any]:
    p_V, q_V = _softmax(before_V), _softmax(after_V)
    return {
        "position": position,
        "kl": kl_divergence(p_V, q_V),
        "same_logits": bool(np.array_equal(before_V, after_V)),
        "before": _top(engine, p_V, q_V),
        "after": _top(engine, q_V, p_V),
    }


def _top(engine: Engine, shown_V: Float64, other_V: Float64) -> list[dict[str, Any]]:
    """Return the likeliest tokens, each with its probability on the other side."""
    best = np.argsort(-shown_V, kind="stable")[:NUM_TOP].tolist()
    return [
        {
            "id": token_id,
            "text": engine.tokenizer.token(token_id),
            "probability": float(shown_V[token_id]),
            "otherwise": float(other_V[token_id]),
        }
        for token_id in best
    ]


def _softmax(logits_V: np.ndarray) -> Float64:
    shifted_V = np.exp(logits_V.astype(np.float64) - logits_V.max())
    found: Float64 = shifted_V / shifted_V.sum()
    return found
