"""Choosing experts: ours against eager torch as users write it and as transformers' routers do.

All start from the same logits and give ids and weights; transformers' own lines run, its product
taken out. Contenders take turns, round by round. Ours also counts rows with broken logits and
breaks ties in a fixed order; with its explanation (the runner-up and every score) it is timed too.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from engine.errors import RequestError
from engine.kernels.router import RouterConfig
from engine.kernels.topk import route
from workbench.bench.machine import report, torch_threads

Choice = tuple[Tensor, Tensor]
"""Ids and weights, both (T, K)."""
Contender = Callable[[Tensor], Choice]

SHAPES = ((8, 2), (64, 8), (256, 8))
"""(experts, K)."""
AIM = {"experts": 256, "tokens": 512, "speedup": 2.0}
BURST_MS = 2.0
"""How long a contender runs at a time."""


def run(
    _model: Path | None = None,
    *,
    tokens: tuple[int, ...] = (1, 8, 64, 512),
    rounds: int = 15,
    threads: int | None = None,
) -> dict[str, Any]:
    """Measure one row per router and number of tokens; no model is used.

    Args:
        tokens: sizes of the batch.
        rounds: turns of each contender; one more, before, is thrown away.
        threads: of torch; None leaves its setting.

    Raises:
        RequestError: a number is below 1.
    """
    if min(*tokens, rounds) < 1:
        raise RequestError("tokens and rounds must be whole numbers of at least 1.")
    rows = []
    with torch_threads(threads), torch.inference_mode():
        for num_experts, k in SHAPES:
            for num_tokens in tokens:
                rows.append(_softmax(num_experts, k, num_tokens, rounds))
        for num_tokens in tokens:
            rows.append(_deepseek_v3(num_tokens, rounds))
        words = f"--tokens {','.join(map(str, tokens))} --rounds {rounds}"
        words += f" --threads {threads}" if threads else ""
        return report(rows, f"workbench bench gate {words} --json") | _summary(rows)


def _softmax(num_experts: int, k: int, num_tokens: int, rounds: int) -> dict[str, Any]:
    """Measure a renormalised softmax router (Mixtral, Qwen3-MoE)."""

    def eager(logits_TE: Tensor) -> Choice:
        weights_TK, ids_TK = torch.topk(torch.softmax(logits_TE, dim=-1), k, dim=-1)
        return ids_TK, weights_TK / weights_TK.sum(dim=-1, keepdim=True)

    config = {"norm_topk_prob": True}
    peers: dict[str, Contender] = {"eager": eager}
    if find_spec("transformers"):
        names = "qwen3_moe", "Qwen3MoeTopKRouter"
        peers["transformers"] = _transformers(*names, num_experts, k, config)
    router = RouterConfig.softmax(k, renormalise=True)
    logits_TE = _logits(num_tokens, num_experts)
    return {"router": "softmax"} | _compare(logits_TE, router, {}, peers, rounds)


def _deepseek_v3(num_tokens: int, rounds: int) -> dict[str, Any]:
    """Measure DeepSeek-V3's router: 256 experts in 8 groups of which 4 are kept."""
    bias_E = 0.1 * _logits(1, 256)[0]
    limit = {"n_group": 8, "topk_group": 4, "norm_topk_prob": True}

    def eager(logits_TE: Tensor) -> Choice:
        scores_TE = torch.sigmoid(logits_TE)
        order_TE = scores_TE + bias_E
        worth_TG = order_TE.view(-1, 8, 32).topk(2, dim=-1).values.sum(-1)
        kept_TG = torch.zeros_like(worth_TG).scatter_(1, worth_TG.topk(4, dim=-1).indices, 1)
        mask_TE = kept_TG.repeat_interleave(32, dim=1) == 0
        ids_TK = order_TE.masked_fill(mask_TE, -math.inf).topk(8, dim=-1).indices
        weights_TK = scores_TE.gather(1, ids_TK)
        return ids_TK, weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20) * 2.5

    peers: dict[str, Contender] = {"eager": eager}
    if find_spec("transformers"):
        names = "deepseek_v3", "DeepseekV3TopkRouter"
        peers["transformers"] = _transformers(*names, 256, 8, limit, bias_E)
    router = RouterConfig.deepseek_v3(8, num_groups=8, keep=4, scale=2.5)
    options = {"selection_bias_E": bias_E}
    return {"router": "deepseek_v3"} | _compare(
        _logits(num_tokens, 256), router, options, peers, rounds
    )


def _transformers(
    family: str,
    name: str,
    num_experts: int,
    k: int,
    config: dict[str, Any],
    bias_E: Tensor | None = None,
) -> Contender:
    """Return transformers' router of a family without its product: it takes logits."""
    modeling: Any = import_module(f"transformers.models.{family}.modeling_{family}")
    shape = {"hidden_size": num_experts, "num_experts": num_experts, "num_experts_per_tok": k}
    more = {"num_local_experts": num_experts, "routed_scaling_factor": 2.5}
    module = getattr(modeling, name)(SimpleNamespace(**shape, **more, **config)).eval()
    if bias_E is not None:
        module.e_score_correction_bias.copy_(bias_E)
    without_product = SimpleNamespace(linear=lambda x, *_: x)

    def choose(logits_TE: Tensor) -> Choice:
        kept, modeling.F = modeling.F, without_product
        try:
            _, weights_TK, ids_TK = module(logits_TE)
        finally:
            modeling.F = kept
        return ids_TK, weights_TK

    return choose


def _compare(
    logits_TE: Tensor,
    router: RouterConfig,
    options: dict[str, Any],
    peers: dict[str, Contender],
    rounds: int,
) -> dict[str, Any]:
    def ours(logits_TE: Tensor) -> Choice:
        chosen = route(logits_TE, router, explain=False, **options)
        return chosen.topk_ids_TK, chosen.topk_weights_TK

    def explained(logits_TE: Tensor) -> Choice:
        chosen = route(logits_TE, router, **options)
        return chosen.topk_ids_TK, chosen.topk_weights_TK

    contenders = {"ours": ours, "explained": explained} | peers
    expected = _dense(*ours(logits_TE), logits_TE)
    for name, contender in contenders.items():
        same = torch.allclose(_dense(*contender(logits_TE), logits_TE), expected, rtol=1e-4)
        assert same, f"{name} chose or weighed otherwise"
    ms = _time(contenders, logits_TE, rounds)
    peers_ms = {name: ms[name] for name in peers}
    return {
        "experts": logits_TE.shape[1],
        "top_k": router.top_k,
        "tokens": logits_TE.shape[0],
        "ours_ms": ms["ours"],
        "ours_explained_ms": ms["explained"],
        "peers_ms": peers_ms,
        "speedup_over_best_peer": round(min(peers_ms.values()) / ms["ours"], 2),
    }


def _time(contenders: dict[str, Contender], logits_TE: Tensor, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of a call, over bursts in turns."""
    bursts: dict[str, int] = {}
    for name, contender in contenders.items():
        began = time.perf_counter()
        for _ in range(3):
            contender(logits_TE)
        call_ms = (time.perf_counter() - began) / 3 * 1e3
        bursts[name] = max(1, round(BURST_MS / call_ms))
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, contender in contenders.items():
            began = time.perf_counter()
            for _ in range(bursts[name]):
                contender(logits_TE)
            if number:  # the first round warms up
                taken[name].append((time.perf_counter() - began) / bursts[name] * 1e3)
    return {name: round(statistics.median(times), 5) for name, times in taken.items()}


def _logits(num_tokens: int, num_experts: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_tokens, num_experts, generator=generator)


def _dense(ids_TK: Tensor, weights_TK: Tensor, logits_TE: Tensor) -> Tensor:
    return torch.zeros_like(logits_TE).scatter(1, ids_TK, weights_TK)


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    speedups = [row["speedup_over_best_peer"] for row in rows]
    of_aim = [
        row["speedup_over_best_peer"]
        for row in rows
        if row["experts"] == AIM["experts"] and row["tokens"] == AIM["tokens"]
    ]
    found: dict[str, Any] = {
        "geomean_speedup": round(statistics.geometric_mean(speedups), 2),
        "worst_speedup": min(speedups),
        "aim": AIM,
    }
    if of_aim:
        found["aim"] = AIM | {"reached": min(of_aim), "met": min(of_aim) >= AIM["speedup"]}
    return found
