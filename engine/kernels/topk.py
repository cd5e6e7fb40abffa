"""Choose each token's experts: score, select and normalise.

The order is fixed on every path: higher score first, then lower expert id. Called by
`engine.routing.gate`; the runner-up comes out of the same selection, so that what is explained
later is what was decided.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_LARGEST = torch.finfo(torch.float32).max


class Selection(NamedTuple):
    """The choice for T tokens, with all that was compared to make it."""

    topk_ids_TK: Tensor
    """(T, K) int64 logical experts, best first."""
    topk_weights_TK: Tensor
    """(T, K) fp32 routing weights, applied once, in combine."""
    scores_TE: Tensor
    """(T, E) fp32 what was compared."""
    ranked_scores_TE: Tensor
    """(T, E) fp32 the scores in order of preference."""
    ranked_ids_TE: Tensor
    """(T, E) int64 the experts in order of preference."""
    bad_rows: int
    """Rows with a logit that was not finite."""


def topk_softmax(
    logits_TE: Tensor,
    k: int,
    *,
    renormalise: bool,
    scale: float = 1.0,
    preferred_E: Tensor | None = None,
    banned_E: Tensor | None = None,
) -> Selection:
    """Score by softmax over all experts and keep the k best.

    Logits ``[2, 1, 0, -1]`` with k=2 give weights 0.6439 and 0.2369, 0.7311 and 0.2689 when
    renormalised, 1.6098 and 0.5922 with scale 2.5 instead. A NaN logit is read as the lowest, an
    infinite one as the largest finite number; such rows are counted and still get k distinct
    experts and finite weights.

    Args:
        logits_TE: (T, E) fp32; T may be 0.
        k: experts per token, 1 to E.
        renormalise: whether each row's k weights sum to 1 before `scale`.
        scale: factor on the weights, applied once, here.
        preferred_E: (E,) bool; these go before all others, by score among themselves. Their
            weights stay their own scores.
        banned_E: (E,) bool; these score 0 and come last.

    Source: Mixtral (arXiv 2401.04088, section 2.1) with `renormalise`, Switch (2101.03961) without.
    """
    bad_rows = 0
    if not bool(torch.isfinite(logits_TE.sum())):
        bad_rows = int((~torch.isfinite(logits_TE)).any(-1).sum())
        logits_TE = logits_TE.nan_to_num(nan=-_LARGEST, posinf=_LARGEST, neginf=-_LARGEST)
    if banned_E is not None:
        logits_TE = logits_TE.masked_fill(banned_E, float("-inf"))
    scores_TE = torch.softmax(logits_TE, dim=-1)
    ranked_scores_TE, ranked_ids_TE = _rank(scores_TE, preferred_E, banned_E)
    topk_weights_TK = ranked_scores_TE[:, :k]
    if renormalise and preferred_E is not None:
        # The same weights, but not 0 / 0 where the preferred score too little for fp32.
        topk_weights_TK = torch.softmax(logits_TE.gather(-1, ranked_ids_TE[:, :k]), dim=-1)
    elif renormalise:
        topk_weights_TK = topk_weights_TK / topk_weights_TK.sum(-1, keepdim=True)
    if scale != 1.0:
        topk_weights_TK = topk_weights_TK * scale
    return Selection(
        ranked_ids_TE[:, :k], topk_weights_TK, scores_TE, ranked_scores_TE, ranked_ids_TE, bad_rows
    )


def _rank(
    scores_TE: Tensor, preferred_E: Tensor | None, banned_E: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Order each row by score, then move the preferred to the front and the banned to the end."""
    ranked_scores_TE, ranked_ids_TE = torch.sort(scores_TE, dim=-1, descending=True, stable=True)
    if preferred_E is None and banned_E is None:
        return ranked_scores_TE, ranked_ids_TE
    class_E = torch.zeros(scores_TE.shape[-1], dtype=torch.int8, device=scores_TE.device)
    if preferred_E is not None:
        class_E += preferred_E
    if banned_E is not None:
        class_E -= 1 * banned_E
    regrouped = torch.sort(class_E[ranked_ids_TE], dim=-1, descending=True, stable=True).indices
    return ranked_scores_TE.gather(-1, regrouped), ranked_ids_TE.gather(-1, regrouped)
