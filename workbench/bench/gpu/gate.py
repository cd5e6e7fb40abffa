"""The gate's selection against eager torch: the same ids, and how long each takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from workbench.bench.gpu.setting import Row, Setting
from workbench.bench.gpu.timing import graph_milliseconds, milliseconds

Eager = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
GROUPS, KEPT, SCALE = 8, 4, 2.5
TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of router and its size."""

    name: str
    num_experts: int
    top_k: int
    eager: Eager


def softmax_eager(logits_TE: Tensor, bias_E: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Softmax, top-k, renormalised, as models write it; `bias_E` is not used."""
    weights_TK, ids_TK = torch.softmax(logits_TE.float(), dim=-1).topk(k)
    return ids_TK, weights_TK / weights_TK.sum(-1, keepdim=True)


def grouped_eager(logits_TE: Tensor, bias_E: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Sigmoid, a bias that only selects, the best groups by their two best, as models write it."""
    scores_TE = torch.sigmoid(logits_TE.float())
    biased = (scores_TE + bias_E).view(len(scores_TE), GROUPS, -1)
    best = biased.topk(2, dim=-1).values.sum(-1).topk(KEPT, dim=-1).indices
    kept = torch.zeros(biased.shape[:2], dtype=torch.bool, device=logits_TE.device)
    masked = biased.masked_fill(~kept.scatter(1, best, True).unsqueeze(-1), float("-inf"))
    ids_TK = masked.flatten(1).topk(k).indices
    weights_TK = scores_TE.gather(1, ids_TK)
    return ids_TK, weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20) * SCALE


KINDS = (
    Kind("softmax", 64, 8, softmax_eager),
    Kind("softmax", 256, 8, softmax_eager),
    Kind("deepseek-v3", 256, 8, grouped_eager),
)


def run(setting: Setting) -> None:
    """Compare and time each kind at each batch size."""
    for kind in KINDS:
        for tokens in setting.tokens[-1:] if setting.dry else setting.tokens:
            names = {"kind": kind.name, "experts": kind.num_experts, "tokens": tokens}
            if setting.late(**names):
                continue
            with setting.case(**names) as row:
                _measure(setting, kind, tokens, row)


def _measure(setting: Setting, kind: Kind, tokens: int, row: Row) -> None:
    from engine.kernels.gpu.topk import route
    from engine.kernels.router import RouterConfig

    device = setting.device
    generator = torch.Generator(device).manual_seed(tokens)
    logits_TE = torch.randn(tokens, kind.num_experts, device=device, generator=generator)
    bias_E = torch.randn(kind.num_experts, device=device, generator=generator) * 0.1
    biased = kind.eager is grouped_eager
    router = RouterConfig.softmax(kind.top_k, renormalise=True)
    if biased:
        router = RouterConfig.deepseek_v3(kind.top_k, num_groups=GROUPS, keep=KEPT, scale=SCALE)
    ours = partial(
        route, logits_TE, router, selection_bias_E=bias_E if biased else None, explain=False
    )
    eager = partial(kind.eager, logits_TE, bias_E, kind.top_k)
    chosen, (ids_TK, weights_TK) = ours(), eager()
    row["right"] = bool(
        torch.equal(_by_id(chosen.topk_ids_TK, chosen.topk_ids_TK), _by_id(ids_TK, ids_TK))
        and torch.allclose(
            _by_id(chosen.topk_weights_TK, chosen.topk_ids_TK),
            _by_id(weights_TK, ids_TK),
            rtol=TOLERANCE,
            atol=TOLERANCE,
        )
    )
    if setting.dry:
        return
    row["ours_ms"] = milliseconds([ours], device)
    row["eager_ms"] = milliseconds([eager], device)
    row["speedup"] = row["eager_ms"] / row["ours_ms"]
    row["ours_graph_ms"] = graph_milliseconds([ours], device)
    row["eager_graph_ms"] = graph_milliseconds([eager], device)
    row["graph_speedup"] = row["eager_graph_ms"] / row["ours_graph_ms"]


def _by_id(values_TK: Tensor, ids_TK: Tensor) -> Tensor:
    """Return values in the order of their ids: torch promises none among equal scores."""
    return values_TK.gather(1, ids_TK.argsort(dim=1))
