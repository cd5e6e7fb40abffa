"""A gate of any router: its biases are parameters, and its choice is the operation's."""

from __future__ import annotations

import pytest
import torch

from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.faults import Faults
from engine.kernels import reference_router
from engine.kernels.registry import Target, bind
from engine.kernels.router import GroupLimit, RouterConfig
from engine.routing.gate import Gate, router_of
from engine.routing.policy import RoutingPolicy
from tests.numerics import close

E, D = 16, 32


def config(**options):
    shape = {"vocab_size": 9, "hidden_size": D, "num_layers": 1, "num_heads": 1, "head_dim": 2}
    moe = {"moe_intermediate_size": 4, "num_experts": E, "top_k": 2}
    rest = {"family": "qwen3_moe", "num_kv_heads": 1, "intermediate_size": 4}
    return ModelConfig(**shape | moe | rest | options)


def gate_of(router=None, *, deterministic=False, **options):
    ops = bind(Target(device="cpu", dtype="float32", deterministic=deterministic))
    gate = Gate(config(**options), ops, Faults(), router)
    generator = torch.Generator().manual_seed(0)
    for parameter in gate.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return gate


ROUTERS = {
    "gpt-oss": (RouterConfig.gpt_oss(4), {"weight", "logit_bias"}),
    "deepseek-v3": (
        RouterConfig.deepseek_v3(4, num_groups=4, keep=2, scale=2.5),
        {"weight", "selection_bias"},
    ),
    "deepseek-v4": (RouterConfig.deepseek_v4(4), {"weight", "selection_bias"}),
    "llama4": (RouterConfig.llama4(1), {"weight"}),
    "phimoe": (RouterConfig.phimoe(), {"weight"}),
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ROUTERS)
def test_a_gate_has_its_routers_biases_and_chooses_with_them(name, deterministic):
    router, parameters = ROUTERS[name]
    gate = gate_of(router, deterministic=deterministic)
    assert {key for key, _ in gate.named_parameters()} == parameters
    logits = gate.logits(torch.randn(40, D, generator=torch.Generator().manual_seed(1)))
    chosen = gate.select(logits, None)
    biases = {f"{key}_E": getattr(gate, key) for key in parameters - {"weight"}}
    oracle = reference_router.route(logits, router, **biases)
    assert torch.equal(chosen.topk_ids_TK, oracle.topk_ids_TK)
    assert close(chosen.topk_weights_TK, oracle.topk_weights_TK, 5e-6)
    for key in biases:
        without = reference_router.route(logits, router, **{key: torch.zeros(E)})
        assert not torch.equal(chosen.topk_ids_TK, without.topk_ids_TK)


def test_biases_are_born_as_nan_so_that_none_is_forgotten():
    ops = bind(Target(device="cpu", dtype="float32", deterministic=False))
    gate = Gate(config(), ops, Faults(), ROUTERS["deepseek-v3"][0])
    assert all(parameter.isnan().all() for parameter in gate.parameters())


def test_the_loaded_family_gets_its_router_from_the_models_config():
    for renormalise, scale in ((True, 1.0), (False, 2.5)):
        options = {"norm_topk_prob": renormalise, "routed_scaling_factor": scale}
        expected = RouterConfig.softmax(2, renormalise=renormalise, scale=scale)
        assert router_of(config(**options)) == gate_of(**options).router == expected
    assert {key for key, _ in gate_of().named_parameters()} == {"weight"}


def test_a_policy_rules_over_a_gate_with_biases():
    gate = gate_of(ROUTERS["deepseek-v3"][0])
    policy = RoutingPolicy(num_layers=1, num_experts=E, top_k=4).ban(0, 3).force(0, 9).layers()[0]
    logits = gate.logits(torch.randn(40, D))
    ids = gate.select(logits, policy).topk_ids_TK
    assert (ids[:, 0] == 9).all() and not (ids == 3).any()


def test_a_router_that_does_not_fit_the_experts_is_refused_when_the_gate_is_made():
    with pytest.raises(ConfigError, match=r"experts \(16\) must be a multiple of num_groups \(5\)"):
        gate_of(RouterConfig.deepseek_v2(2, num_groups=5, keep=1))
    with pytest.raises(ConfigError, match=r"top_k \(5\) must be at most the 4 experts of the 1"):
        gate_of(RouterConfig.deepseek_v3(5, num_groups=4, keep=1))
    with pytest.raises(ConfigError, match="groups of 1 expert have no two best"):
        gate_of(RouterConfig.deepseek_v3(1, num_groups=16, keep=1))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_k": 0}, "top_k (0)"),
        ({"top_k": 2, "score": "sigmiod"}, "did you mean 'sigmoid'?"),
        ({"top_k": 2, "eps": -1.0}, "eps (-1.0) must be finite and at least 0."),
        ({"top_k": 2, "eps": float("nan")}, "eps (nan)"),
        ({"top_k": 2, "scale": float("inf")}, "scale (inf) must be finite."),
        ({"top_k": 2, "scale": "2"}, "scale ('2') must be a number."),
        ({"top_k": 3, "score": "sparsemixer"}, "top_k (3) must be 2"),
        ({"top_k": 2, "score": "sparsemixer", "renormalise": True}, "neither renormalise"),
    ],
)
def test_a_router_with_a_wrong_value_is_refused_by_name(options, words):
    with pytest.raises(ConfigError) as caught:
        RouterConfig(**options)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_groups": 0}, "num_groups (0)"),
        ({"keep": 5}, "keep (5) must be at most num_groups (4)."),
        ({"score": "mean"}, "score (mean) must be one of max, top2_sum"),
        ({"masked": 1.0}, "masked (1.0) must be 0 or -inf."),
    ],
)
def test_a_group_limit_with_a_wrong_value_is_refused_by_name(changes, words):
    right = {"num_groups": 4, "keep": 2, "score": "max", "masked": 0.0}
    with pytest.raises(ConfigError) as caught:
        GroupLimit(**right | changes)
    assert words in str(caught.value)
