"""Each kind of router against transformers' class of its family, on rows without ties."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import reference_router
from engine.kernels.router import RouterConfig
from engine.kernels.topk import Selection, route
from tests.numerics import close

WIDTH, TOKENS = 48, 200


class Family(NamedTuple):
    """A class of transformers with what it reads from its model's config, and our router."""

    module: str
    name: str
    num_experts: int
    config: dict[str, Any]
    router: RouterConfig


FAMILIES = {
    "mixtral": Family(
        "mixtral", "MixtralTopKRouter", 8, {}, RouterConfig.softmax(2, renormalise=True)
    ),
    "qwen3-moe": Family(
        "qwen3_moe",
        "Qwen3MoeTopKRouter",
        128,
        {"norm_topk_prob": True},
        RouterConfig.softmax(8, renormalise=True),
    ),
    "olmoe": Family(
        "olmoe",
        "OlmoeTopKRouter",
        64,
        {"norm_topk_prob": False},
        RouterConfig.softmax(8, renormalise=False),
    ),
    "gpt-oss": Family("gpt_oss", "GptOssTopKRouter", 32, {}, RouterConfig.gpt_oss(4)),
    "llama4": Family("llama4", "Llama4Router", 16, {}, RouterConfig.llama4(1)),
    "phimoe": Family(
        "phimoe",
        "PhimoeTopKRouter",
        16,
        {"router_jitter_noise": 0.05, "input_jitter_noise": 0.0},
        RouterConfig.phimoe(jitter=0.05),
    ),
    "deepseek-v2": Family(
        "deepseek_v2",
        "DeepseekV2TopkRouter",
        160,
        {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3},
        RouterConfig.deepseek_v2(6, num_groups=8, keep=3, scale=16.0),
    ),
    "deepseek-v2-lite": Family(
        "deepseek_v2",
        "DeepseekV2TopkRouter",
        64,
        {"topk_method": "greedy", "n_group": 1, "topk_group": 1},
        RouterConfig.deepseek_v2(6),
    ),
    "deepseek-v3": Family(
        "deepseek_v3",
        "DeepseekV3TopkRouter",
        256,
        {"n_group": 8, "topk_group": 4, "norm_topk_prob": True},
        RouterConfig.deepseek_v3(8, num_groups=8, keep=4, scale=2.5),
    ),
    "deepseek-v4": Family(
        "deepseek_v4",
        "DeepseekV4TopKRouter",
        256,
        {"scoring_func": "sqrtsoftplus"},
        RouterConfig.deepseek_v4(6, scale=1.5),
    ),
}
BIASES = {"bias": "logit_bias_E", "e_score_correction_bias": "selection_bias_E"}
"""Name in transformers -> argument of `route`."""


def theirs(family: Family) -> torch.nn.Module:
    """Build transformers' router, its weights random, its biases large enough to decide."""
    module = import_module(f"transformers.models.{family.module}.modeling_{family.module}")
    config = SimpleNamespace(
        hidden_size=WIDTH,
        num_experts=family.num_experts,
        num_local_experts=family.num_experts,
        num_experts_per_tok=family.router.top_k,
        routed_scaling_factor=family.router.scale,
        **family.config,
    )
    router = getattr(module, family.name)(config).eval()
    generator = torch.Generator().manual_seed(0)
    for name, tensor in (*router.named_parameters(), *router.named_buffers()):
        size = 0.3 if name == "weight" else 0.2
        tensor.data = size * torch.randn(tensor.shape, generator=generator)
    return router


def in_order_of_ids(ids_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Sort each row by id: transformers does not always return the best first."""
    order_TK = ids_TK.argsort(-1)
    return ids_TK.gather(1, order_TK), weights_TK.gather(1, order_TK)


def choice_of(router: torch.nn.Module, x_TD: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Run transformers' router and return ids and weights in order of ids."""
    outputs = router(x_TD)
    if len(outputs) == 3:
        return in_order_of_ids(outputs[2], outputs[1])
    scores_TE = outputs[0]  # Llama 4 returns all, 0 where not chosen
    ids_TK = (scores_TE > 0).nonzero()[:, 1].view(-1, k)
    return ids_TK, scores_TE.gather(1, ids_TK)


def compared(name: str, choose: Callable[..., Selection] = route) -> tuple[bool, bool]:
    """Whether ids and weights are those of transformers."""
    family = FAMILIES[name]
    router = theirs(family)
    x_TD = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    given = {key: getattr(router, bias) for bias, key in BIASES.items() if hasattr(router, bias)}
    given = {key: bias.detach() for key, bias in given.items() if bias is not None}
    with torch.no_grad():
        logits_TE = F.linear(x_TD, router.weight)
        oracle = reference_router.route(logits_TE, family.router, **given)
        clear = oracle.clearance_T > 1e-5
        assert clear.double().mean() > 0.9
        ids_TK, weights_TK = choice_of(router, x_TD, family.router.top_k)
        chosen = choose(logits_TE, family.router, **given)
    ours_TK, our_weights_TK = in_order_of_ids(chosen.topk_ids_TK, chosen.topk_weights_TK)
    return (
        torch.equal(ours_TK[clear], ids_TK[clear]),
        close(our_weights_TK[clear], weights_TK[clear], 2e-6),
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_ids_and_weights_are_those_of_transformers(name):
    assert compared(name) == (True, True)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_comparison_fails_for_other_weights_and_another_choice(name):
    def heavier(*arguments, **options):
        chosen = route(*arguments, **options)
        return chosen._replace(topk_weights_TK=chosen.topk_weights_TK * 1.0001)

    def second_best(*arguments, **options):
        chosen = route(*arguments, **options)
        k = chosen.topk_ids_TK.shape[1]
        return chosen._replace(topk_ids_TK=chosen.ranked_ids_TJ[:, -k:])

    assert compared(name, heavier) == (True, False)
    assert compared(name, second_best)[0] is False
