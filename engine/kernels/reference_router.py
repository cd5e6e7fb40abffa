"""The oracle of the routers: each kind written out row by row in fp64, with loops.

Tests hold every path of `route` against this; nothing else calls it, and it shares no line with
them. Scores are compared in fp64, so rows to compare must have no two orders closer than fp32 can
tell apart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.kernels.router import RouterConfig

_LARGEST = float(torch.finfo(torch.float32).max)


class Routed(NamedTuple):
    """What the oracle chose for T tokens."""

    topk_ids_TK: Tensor
    """(T, K) int64, best first."""
    topk_weights_TK: Tensor
    """(T, K) fp64."""
    runner_up_T: Tensor
    """(T,) int64, -1 where every expert was chosen."""
    margin_T: Tensor
    """(T,) fp64: what the last chosen had more than the runner-up; inf without one."""
    clearance_T: Tensor
    """(T,) fp64: the smallest relative gap, equals aside, between numbers whose order mattered; inf
    where logits were compared as they came, which no rounding can confuse."""
    bad_rows: int


def route(
    logits_TE: Tensor,
    router: RouterConfig,
    *,
    logit_bias_E: Tensor | None = None,
    selection_bias_E: Tensor | None = None,
) -> Routed:
    """Choose and weigh as `engine.kernels.topk.route` describes."""
    num_tokens, num_experts = logits_TE.shape
    bias = [0.0] * num_experts if logit_bias_E is None else logit_bias_E.double().tolist()
    lift = [0.0] * num_experts if selection_bias_E is None else selection_bias_E.double().tolist()
    k, bad_rows = router.top_k, 0
    ids, weights, runners_up, margins, clearances = [], [], [], [], []
    for row in logits_TE.double().tolist():
        logits = [logit + extra for logit, extra in zip(row, bias, strict=True)]
        bad_rows += not all(math.isfinite(logit) for logit in logits)
        logits = [_finite(logit) for logit in logits]
        scores = _scores(logits, router.score)
        order = [score + extra for score, extra in zip(scores, lift, strict=True)]
        if router.groups is None and not router.selection_bias:
            order = logits  # the same order, also where a score is too small to be told apart
        clearance = math.inf
        if router.groups is not None:
            order, clearance = _limited(order, router)
        ranked = sorted(range(num_experts), key=lambda expert: (-order[expert], expert))
        ids.append(ranked[:k])
        weights.append(_weights(logits, scores, ranked[:k], router))
        runners_up.append(ranked[k] if k < num_experts else -1)
        if order is not logits or router.logit_bias:
            clearance = min(clearance, _smallest_gap([order[e] for e in ranked[: k + 1]]))
        clearances.append(clearance)
        compared = scores if order is logits else order
        last = compared[ranked[k - 1]]
        margins.append(last - compared[ranked[k]] if k < num_experts else math.inf)
    return Routed(
        torch.tensor(ids, dtype=torch.int64).view(num_tokens, k),
        torch.tensor(weights, dtype=torch.float64).view(num_tokens, k),
        torch.tensor(runners_up, dtype=torch.int64),
        torch.tensor(margins, dtype=torch.float64),
        torch.tensor(clearances, dtype=torch.float64),
        bad_rows,
    )


def _finite(logit: float) -> float:
    if math.isnan(logit):
        return -_LARGEST
    return max(-_LARGEST, min(_LARGEST, logit))


def _scores(logits: Sequence[float], kind: str) -> list[float]:
    if kind == "sigmoid":
        return [_sigmoid(logit) for logit in logits]
    if kind == "sqrt_softplus":
        return [math.sqrt(max(logit, 0.0) + math.log1p(math.exp(-abs(logit)))) for logit in logits]
    peak = max(logits)
    exps = [math.exp(logit - peak) for logit in logits]
    total = math.fsum(exps)
    return [value / total for value in exps]


def _sigmoid(logit: float) -> float:
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    return math.exp(logit) / (1 + math.exp(logit))


def _smallest_gap(falling: list[float]) -> float:
    gaps = [
        (high - low) / max(abs(high), abs(low))
        for high, low in itertools.pairwise(falling)
        if high != low and math.isfinite(low)
    ]
    return min(gaps, default=math.inf)


def _limited(order: list[float], router: RouterConfig) -> tuple[list[float], float]:
    """Return the order with the experts of other groups masked, and the gaps among the groups."""
    limit = router.groups
    assert limit is not None
    size = len(order) // limit.num_groups
    worths = []
    for group in range(limit.num_groups):
        members = sorted(order[group * size : (group + 1) * size], reverse=True)
        worths.append(members[0] if limit.score == "max" else members[0] + members[1])
    best = sorted(range(limit.num_groups), key=lambda group: (-worths[group], group))
    kept = best[: limit.keep]
    limited = [
        value if expert // size in kept else limit.masked for expert, value in enumerate(order)
    ]
    return limited, _smallest_gap([worths[group] for group in best[: limit.keep + 1]])


def _weights(
    logits: list[float], scores: list[float], chosen: list[int], router: RouterConfig
) -> list[float]:
    if router.score == "sparsemixer":
        first, second = chosen
        rest = [-math.inf if e == first else logit for e, logit in enumerate(logits)]
        weights = [
            _share(logits, logits, first, router.jitter),
            _share(rest, logits, second, router.jitter),
        ]
    elif router.score == "softmax" and router.renormalise and router.eps == 0:
        weights = _scores([logits[expert] for expert in chosen], "softmax")
    else:
        weights = [scores[expert] for expert in chosen]
        if router.renormalise:
            total = math.fsum(weights) + router.eps
            weights = [weight / total if total else 0.0 for weight in weights]
    return [weight * router.scale for weight in weights]


def _share(candidates: list[float], logits: list[float], chosen: int, jitter: float) -> float:
    """Return the chosen expert's part of a softmax over the candidates that lie close to it."""
    best, total = logits[chosen], 0.0
    for candidate, logit in zip(candidates, logits, strict=True):
        factor = max(abs(logit), best)
        far = factor != 0 and (best - logit) / factor > 2 * jitter
        if not far:
            total += math.exp(candidate - best)
    return 1 / total
