"""What an operator tells the gate, and the small public router."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from engine.errors import ConfigError, RoutingError
from engine.kernels.router import RouterConfig
from engine.kernels.topk import route
from engine.routing.policy import RoutingPolicy
from engine.routing.router import TokenRouter


def policy():
    return RoutingPolicy(num_layers=3, num_experts=8, top_k=2)


def choose(layer_policy, logits):
    return layer_policy.select(
        partial(route, router=RouterConfig.softmax(2, renormalise=True)), logits
    )


def test_an_empty_policy_touches_no_layer():
    assert policy().is_empty and policy().layers() == (None, None, None)


def test_a_ban_holds_in_its_layer_only_and_a_force_wins():
    set_up = policy().ban(1, 4).force(None, 6)
    first, second, third = set_up.layers()
    logits = torch.zeros(5, 8)
    logits[:, 4] = 9.0
    assert choose(first, logits).topk_ids_TK.tolist() == [[6, 4]] * 5
    assert 4 not in choose(second, logits).topk_ids_TK
    assert third is not None and policy().is_empty


def test_a_bias_changes_who_is_chosen_and_the_original_logits_stay():
    biased = policy().favour(0, 7, 5.0).layers()[0]
    logits = torch.zeros(1, 8)
    chosen = choose(biased, logits)
    assert chosen.topk_ids_TK[0, 0] == 7
    assert chosen.topk_weights_TK[0, 0] == pytest.approx(1 / (1 + 2.718281828**-5), rel=1e-5)
    assert (logits == 0).all()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda p: p.ban(None, 8), "between 0 and 7"),
        (lambda p: p.ban(3, 0), "between 0 and 2"),
        (lambda p: p.force(None, 0).force(None, 1).force(1, 2), "at most top_k"),
        (lambda p: p.ban(0, 1).force(0, 1), "both banned and forced"),
        (lambda p: p.favour(0, 1, float("nan")), "bias"),
    ],
)
def test_a_policy_that_cannot_be_followed_is_refused(change, word):
    with pytest.raises(RoutingError, match=word):
        change(policy())


def test_the_last_top_k_experts_cannot_be_banned():
    nearly = policy()
    for expert in range(6):
        nearly = nearly.ban(2, expert)
    with pytest.raises(RoutingError, match="Ban fewer"):
        nearly.ban(2, 6)


def test_the_public_router_returns_ids_weights_and_devices_as_tensors():
    torch.manual_seed(0)
    router = TokenRouter(16, 8, 2, [0, 0, 1, 1, 2, 2, 3, 3])
    hidden = torch.randn(5, 16)
    ids, weights, devices = router(hidden)
    logits = router.gate(hidden)
    scores, expected = torch.topk(logits, 2, dim=-1)
    assert torch.equal(ids, expected)
    assert torch.allclose(weights, torch.softmax(scores, -1), atol=1e-6)
    assert torch.equal(devices, ids // 2)
    weights[:, 0].sum().backward()
    assert router.gate.weight.grad.abs().sum() > 0


def test_the_public_router_follows_a_map_that_changes_and_takes_no_tokens():
    router = TokenRouter(16, 4, 1, [0, 0, 0, 0])
    router.expert_to_device.copy_(torch.tensor([3, 2, 1, 0]))
    ids, _, devices = router(torch.randn(6, 16))
    assert torch.equal(devices, 3 - ids)
    assert [part.shape for part in router(torch.empty(0, 16))] == [(0, 1)] * 3


@pytest.mark.parametrize(
    "arguments",
    [(16, 4, 5, [0] * 4), (16, 4, 0, [0] * 4), (16, 4, 2, [0] * 3), (16, 4, 2, [-1] * 4)],
)
def test_a_router_that_does_not_fit_is_refused(arguments):
    with pytest.raises(ConfigError):
        TokenRouter(*arguments)
