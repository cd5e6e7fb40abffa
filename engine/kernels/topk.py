"""Choose each token's experts: score, select and normalise, for every kind of router.

The order is fixed on every path: higher score first, then lower expert id. Called by
`engine.routing.gate`; the runner-up comes out of the same selection, so that what is explained
later is what was decided.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import KernelError
from engine.kernels import checks
from engine.kernels.rank import best_by_keys, sum_of_best_two
from engine.kernels.router import GroupLimit, RouterConfig

_LARGEST = torch.finfo(torch.float32).max
_SMALLEST = torch.finfo(torch.float32).tiny
_KEYS_FROM = 8192
"""Numbers from which sorting keys beats torch's topk on a CPU; the choice is the same."""
_SHORT, _SORTED = 16, 512
"""Rows of so many experts, or so many numbers in all, are ranked fastest by sorting them."""


class Selection(NamedTuple):
    """The choice for T tokens, with what was compared to make it."""

    topk_ids_TK: Tensor
    """(T, K) int64 logical experts, best first."""
    topk_weights_TK: Tensor
    """(T, K) fp32 routing weights, applied once, in combine."""
    ranked_ids_TJ: Tensor | None
    """(T, J) int64: the chosen, then the runner-up unless every expert was chosen. This and the
    next two are None when no explanation was asked for."""
    ranked_scores_TJ: Tensor | None
    """(T, J) fp32 what was compared: their scores, with selection bias and group mask if any."""
    scores_TE: Tensor | None
    """(T, E) fp32 every expert's score, from which the weights come."""
    bad_rows: int | Tensor
    """Rows with a logit that was not finite; on a GPU a 0-dim tensor that stays there."""
    shut_TE: Tensor | None = None
    """(T, E) bool the experts outside the groups kept; None without groups and without
    explanation."""


def route(
    logits_TE: Tensor,
    router: RouterConfig,
    *,
    logit_bias_E: Tensor | None = None,
    selection_bias_E: Tensor | None = None,
    preferred_E: Tensor | None = None,
    banned_E: Tensor | None = None,
    explain: bool = True,
) -> Selection:
    """Score every expert, keep the K best of each row, and weigh them.

    Logits ``[2, 1, 0, -1]`` with K = 2 and softmax give weights 0.6439 and 0.2369, 0.7311 and
    0.2689 when renormalised, 1.6098 and 0.5922 with scale 2.5 instead. A NaN logit is read as the
    lowest finite number, an infinite one as the largest of its sign; such rows are counted and
    still get K distinct experts and finite weights. A selection bias that is not finite is read the
    same way and makes every row bad.

    Args:
        logits_TE: (T, E) fp32, bf16 or fp16, widened before anything else; T may be 0.
        router: what to do; its `top_k` is K.
        logit_bias_E: (E,) fp32 where `router.logit_bias`, else None.
        selection_bias_E: (E,) fp32 where `router.selection_bias`, else None.
        preferred_E: (E,) bool; these go before all others, by score among themselves, whatever
            their group. Their weights stay their own scores.
        banned_E: (E,) bool; these score 0 and come last, so where fewer than K are left some of the
            chosen are banned and weigh 0. One expert at least must be left.
        explain: whether the runner-up and the scores are wanted; without them it is cheaper.

    Raises:
        ConfigError: K or the groups do not fit E.
        KernelError: an argument has the wrong shape, format or device, or all experts are banned
            (on a GPU that is not looked at, for it would wait for the device).

    Source: the papers at the class methods of `RouterConfig`.
    """
    if (
        router.is_plain
        and logit_bias_E is selection_bias_E is preferred_E is banned_E is None
        and isinstance(logits_TE, Tensor)
        and logits_TE.dtype is torch.float32
        and logits_TE.is_cpu
        and logits_TE.layout is torch.strided
        and logits_TE.ndim == 2
        and logits_TE.numel() < _KEYS_FROM
        and router.top_k <= logits_TE.shape[1]
        and (few := _route_few(logits_TE, router.top_k, explain)) is not None
    ):
        return few
    check_logits(logits_TE, router, logit_bias_E, selection_bias_E, preferred_E, banned_E)
    clean_TE, lift_E, bad_rows = clean(logits_TE, logit_bias_E, selection_bias_E)
    chosen = select(clean_TE, router, lift_E, preferred_E, banned_E, explain)
    return chosen._replace(bad_rows=bad_rows)


def _route_few(logits_TE: Tensor, k: int, explain: bool) -> Selection | None:
    """Do what `select` does for a plain router in as few calls as can be; the bits are the same.

    Returns:
        None where it cannot: numbers that are not finite need more care, and so do ties where
        rows are long.
    """
    logits = (logits_TE.detach() if logits_TE.requires_grad else logits_TE).numpy()
    num_ranked = min(k + explain, logits.shape[1])
    flat = logits.ravel()
    if not math.isfinite(np.dot(flat, flat)):  # the fastest way to read them all
        return None
    if logits.shape[1] <= _SHORT or logits.size <= _SORTED:
        ids_TJ = torch.from_numpy((-logits).argsort(axis=1, kind="stable")[:, :num_ranked])
    else:
        ranked_TJ = _ranked_by_topk(logits_TE.detach(), num_ranked)
        if ranked_TJ is None:
            return None
        ids_TJ = ranked_TJ[:, :num_ranked]
    if not explain:
        return Selection(
            ids_TJ, torch.softmax(logits_TE.gather(1, ids_TJ), dim=-1), None, None, None, 0
        )
    ids_TK = ids_TJ[:, :k]
    weights_TK = torch.softmax(logits_TE.gather(1, ids_TK), dim=-1)
    scores_TE = torch.softmax(logits_TE, dim=-1)
    return Selection(ids_TK, weights_TK, ids_TJ, scores_TE.gather(1, ids_TJ), scores_TE, 0)


def clean(
    logits_TE: Tensor, logit_bias_E: Tensor | None, selection_bias_E: Tensor | None
) -> tuple[Tensor, Tensor | None, int | Tensor]:
    """Make all finite.

    Returns:
        fp32 logits with their bias added, the selection bias, and how many rows were not finite,
        all of them where the selection bias was not.
    """
    logits_TE = logits_TE.float()
    if logit_bias_E is not None:
        logits_TE = logits_TE + logit_bias_E
    on_cpu = logits_TE.device.type == "cpu"
    parts = (logits_TE,) if selection_bias_E is None else (logits_TE, selection_bias_E)
    if on_cpu and all(math.isfinite(part.sum().item()) for part in parts):
        return logits_TE, selection_bias_E, 0
    bad_T = (~torch.isfinite(logits_TE)).any(-1)
    if selection_bias_E is not None:
        bad_T = bad_T | ~torch.isfinite(selection_bias_E).all()
        selection_bias_E = _finite(selection_bias_E)
    bad_rows = bad_T.sum()
    return _finite(logits_TE), selection_bias_E, int(bad_rows) if on_cpu else bad_rows


def _finite(numbers: Tensor) -> Tensor:
    return numbers.nan_to_num(nan=-_LARGEST, posinf=_LARGEST, neginf=-_LARGEST)


def select(
    logits_TE: Tensor,
    router: RouterConfig,
    selection_bias_E: Tensor | None,
    preferred_E: Tensor | None,
    banned_E: Tensor | None,
    explain: bool,
) -> Selection:
    """Choose from clean logits; the arguments are those of `route`, and no row is bad."""
    if banned_E is not None:
        logits_TE = logits_TE.masked_fill(banned_E, -math.inf)
    scores_TE = None
    if explain or not router.weighs_logits:
        scores_TE = _score(logits_TE, router)
    order_TE, shut_TE = logits_TE, None
    if not router.orders_logits:
        assert scores_TE is not None
        order_TE, shut_TE = _order(
            scores_TE, router, selection_bias_E, preferred_E, banned_E, explain
        )
    num_ranked = min(router.top_k + explain, logits_TE.shape[1])
    ranked_ids_TJ = _rank(order_TE, num_ranked, preferred_E, banned_E)
    topk_ids_TK = ranked_ids_TJ[:, : router.top_k]
    weights_TK = _weigh(router, logits_TE, scores_TE, topk_ids_TK)
    if not explain:
        return Selection(topk_ids_TK, weights_TK, None, None, None, 0)
    assert scores_TE is not None
    compared_TE = scores_TE if router.orders_logits else order_TE
    ranked_scores_TJ = compared_TE.gather(-1, ranked_ids_TJ)
    return Selection(
        topk_ids_TK, weights_TK, ranked_ids_TJ, ranked_scores_TJ, scores_TE, 0, shut_TE
    )


def joined(parts: Sequence[Selection], rows: Tensor | slice) -> Selection:
    """Put choices of the same router behind each other and take `rows` of the whole."""

    def column(tensors: Sequence[Any]) -> Any:
        return None if tensors[0] is None else torch.cat(list(tensors))[rows]

    *tensors, bad_rows, shut = zip(*parts, strict=True)
    return Selection._make([*map(column, tensors), sum(bad_rows), column(shut)])


def check_logits(
    logits_TE: Tensor,
    router: RouterConfig,
    logit_bias_E: Tensor | None,
    selection_bias_E: Tensor | None,
    preferred_E: Tensor | None,
    banned_E: Tensor | None,
) -> None:
    """Raise what `route` raises for its arguments; on a GPU no value is asked for."""
    checks.rank("logits_TE", logits_TE, "T, E")
    checks.one_of("logits_TE", logits_TE, checks.FLOATS)
    router.check(logits_TE.shape[1])
    if router.logit_bias is (logit_bias_E is None):
        raise KernelError(_unasked("logit_bias", router.logit_bias))
    if router.selection_bias is (selection_bias_E is None):
        raise KernelError(_unasked("selection_bias", router.selection_bias))
    for name, tensor_E, dtype in (
        ("logit_bias_E", logit_bias_E, torch.float32),
        ("selection_bias_E", selection_bias_E, torch.float32),
        ("preferred_E", preferred_E, torch.bool),
        ("banned_E", banned_E, torch.bool),
    ):
        if tensor_E is None or (
            isinstance(tensor_E, Tensor)
            and tensor_E.layout is torch.strided
            and tensor_E.dtype == dtype
            and tensor_E.shape == logits_TE.shape[1:]
            and tensor_E.device == logits_TE.device
        ):
            continue
        fits = f"logits_TE {checks.describe(logits_TE)}"
        checks.tensor(name, tensor_E)
        checks.one_of(name, tensor_E, (dtype,))
        checks.shape(name, tensor_E, (logits_TE.shape[1],), fits)
        checks.same_device(logits_TE=logits_TE, **{name: tensor_E})
    if banned_E is not None and banned_E.device.type == "cpu" and bool(banned_E.all()):
        raise KernelError(
            f"banned_E {checks.describe(banned_E)} bans all experts; leave at least one."
        )


def _unasked(bias: str, wanted: bool) -> str:
    if wanted:
        return f"{bias}_E is None but the router has a {bias}; pass it."
    return f"{bias}_E is given but the router has no {bias}; pass None."


def _score(logits_TE: Tensor, router: RouterConfig) -> Tensor:
    if router.score == "sigmoid":
        return torch.sigmoid(logits_TE)
    if router.score == "sqrt_softplus":
        return torch.sqrt(F.softplus(logits_TE))
    return torch.softmax(logits_TE, dim=-1)


def _order(
    scores_TE: Tensor,
    router: RouterConfig,
    selection_bias_E: Tensor | None,
    preferred_E: Tensor | None,
    banned_E: Tensor | None,
    explain: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return (T, E) what is compared: scores with the selection bias, masked outside the groups.

    The second is where they are masked, None without groups and without explanation.
    """
    order_TE = scores_TE if selection_bias_E is None else scores_TE + selection_bias_E
    if banned_E is not None:
        order_TE = order_TE.masked_fill(banned_E, -math.inf)
    if (limit := router.groups) is not None:
        return _limited(order_TE, limit, preferred_E, explain)
    return order_TE, None


def _limited(
    order_TE: Tensor, limit: GroupLimit, preferred_E: Tensor | None, explain: bool
) -> tuple[Tensor, Tensor | None]:
    """Mask the experts outside the best groups of each row, unless they are preferred."""
    num_tokens, num_experts = order_TE.shape
    size = num_experts // limit.num_groups
    order_TGS = order_TE.view(num_tokens, limit.num_groups, size)
    worth_TG = order_TGS.amax(-1) if limit.score == "max" else sum_of_best_two(order_TGS)
    best_TG = _rank(worth_TG, limit.keep, None, None)
    shut_TG1 = torch.ones_like(worth_TG, dtype=torch.bool).scatter_(1, best_TG, False).unsqueeze(-1)
    if preferred_E is not None:
        shut_TG1 = shut_TG1 & ~preferred_E.view(limit.num_groups, size)
    if limit.masked == -math.inf:  # to add is seven times as fast as to fill
        masked_TGS = order_TGS + torch.zeros_like(shut_TG1, dtype=torch.float32).masked_fill_(
            shut_TG1, -math.inf
        )
    else:
        masked_TGS = order_TGS.masked_fill(shut_TG1, limit.masked)
    shut_TE = shut_TG1.expand_as(order_TGS).flatten(1) if explain else None
    return masked_TGS.flatten(1), shut_TE


def _weigh(
    router: RouterConfig, logits_TE: Tensor, scores_TE: Tensor | None, topk_ids_TK: Tensor
) -> Tensor:
    """Return the (T, K) weights of the chosen."""
    if router.score == "sparsemixer":
        weights_TK = _sparsemixer(logits_TE, topk_ids_TK, router.jitter)
    elif router.weighs_logits:  # a softmax over the chosen sums to 1 as it is
        weights_TK = _score(logits_TE.gather(-1, topk_ids_TK), router)
    else:
        assert scores_TE is not None
        weights_TK = scores_TE.gather(-1, topk_ids_TK)
    if router.renormalise and not (router.weighs_logits and router.score == "softmax"):
        total_T1 = weights_TK.sum(-1, keepdim=True) + router.eps
        weights_TK = weights_TK / total_T1.clamp_min(_SMALLEST)
    return weights_TK if router.scale == 1.0 else weights_TK * router.scale


def _sparsemixer(logits_TE: Tensor, topk_ids_T2: Tensor, jitter: float) -> Tensor:
    """Return each chosen expert's share among the logits close to it that were not chosen before.

    Logits ``[1, 1, 0.99, 0]`` with jitter 0.01 give 1/3 nearly: three lie within 2 % of the best;
    then 1/2 nearly, of the two left. A banned expert, chosen where no other is left, weighs 0.
    """
    weights = []
    for slot in range(2):
        chosen_T1 = topk_ids_T2[:, slot : slot + 1]
        best_T1 = logits_TE.gather(-1, chosen_T1)
        far_TE = best_T1 - logits_TE > 2 * jitter * logits_TE.abs().maximum(best_T1)
        near_TE = logits_TE.masked_fill(far_TE, -math.inf)
        if slot:
            near_TE = near_TE.scatter(-1, topk_ids_T2[:, :1], -math.inf)
        share_T1 = torch.softmax(near_TE, dim=-1).gather(-1, chosen_T1)
        weights.append(share_T1.where(best_T1 > -math.inf, 0.0))
    return torch.cat(weights, dim=-1)


def _rank(
    order_TE: Tensor, count: int, preferred_E: Tensor | None, banned_E: Tensor | None
) -> Tensor:
    """Return (T, count) the best experts of each row: preferred first, banned last."""
    order_TE, on_cpu = order_TE.detach(), order_TE.device.type == "cpu"
    class_E = None
    if preferred_E is not None:
        class_E = preferred_E.long()
    if banned_E is not None:
        class_E = -banned_E.long() if class_E is None else class_E - banned_E.long()
    if on_cpu:
        if class_E is None and order_TE.numel() < _KEYS_FROM:
            if (ranked_TJ := _ranked_by_topk(order_TE, count)) is not None:
                return ranked_TJ[:, :count]
        classes = None if class_E is None else class_E.numpy()
        return torch.from_numpy(best_by_keys(order_TE.numpy(), count, classes))
    order_TE = 0.0 + order_TE  # no negative zero, which a sort by bits puts below zero
    ranked_TE = torch.sort(order_TE, dim=-1, descending=True, stable=True).indices
    if class_E is not None:
        regrouped_TE = torch.sort(class_E[ranked_TE], dim=-1, descending=True, stable=True).indices
        ranked_TE = ranked_TE.gather(-1, regrouped_TE)
    return ranked_TE[:, :count]


def _ranked_by_topk(order_TE: Tensor, count: int) -> Tensor | None:
    """Return the best `count` of each row on a CPU, and the next if there is one.

    torch promises no order among equals, so the result is None if any two of them tie.
    """
    ranked = order_TE.topk(min(count + 1, order_TE.shape[1]), dim=-1)
    return ranked.indices if _falls(ranked.values) else None


def _falls(values_TJ: Tensor) -> bool:
    """Whether each row falls strictly."""
    if len(values_TJ) == 1:
        row: list[float] = values_TJ.tolist()[0]
        return all(map(operator.gt, row, row[1:]))
    # In one line: numpy takes ten times as long for the short rows of a matrix.
    line, width = values_TJ.numpy().ravel(), values_TJ.shape[1]
    falls = line[:-1] > line[1:]
    falls[width - 1 :: width] = True  # from a row to the next
    return bool(falls.all())
