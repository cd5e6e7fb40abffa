from __future__ import annotations

import pytest
import torch

from engine.train.network import MOE, Network
from engine.train.optim import Muon, orthogonalise, rate_scale, split_parameters


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 24, 8), (1, 8, 24)])
def test_orthogonalising_brings_all_singular_values_near_one(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    before = torch.linalg.svdvals(matrices)
    after = torch.linalg.svdvals(orthogonalise(matrices))
    assert before.max() / before.min() > 2
    assert after.min() > 0.4 and after.max() < 1.4


def test_orthogonalising_keeps_the_directions() -> None:
    u, _, vt = torch.linalg.svd(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))
    stretched = u @ torch.diag(torch.linspace(1, 2, 8)) @ vt
    turned = u.mT @ orthogonalise(stretched[None])[0] @ vt.mT
    off_diagonal = turned - torch.diag(turned.diagonal())
    assert turned.diagonal().min() > 0.5
    assert off_diagonal.abs().max() < 0.05


def test_the_rate_warms_up_stays_and_falls() -> None:
    scales = [rate_scale(step, 1000, 100) for step in (49, 99, 400, 499, 750, 999)]
    assert scales == pytest.approx([0.5, 1.0, 1.0, 1.0, 0.5, 0.02])


def test_router_embedding_and_norms_are_left_to_adam() -> None:
    network = Network(MOE)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    matrices, others = split_parameters(network)
    assert {names[id(p)].split(".", 2)[2] for p in matrices} == {
        "attention.qkv.weight",
        "attention.out.weight",
        "moe.experts.gate_up",
        "moe.experts.down",
    }
    assert len(matrices) + len(others) == len(names)


def test_a_step_goes_downhill_in_every_matrix() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 3, 6, 4))
    parameter.grad = torch.randn(2, 3, 6, 4, generator=torch.Generator().manual_seed(2))
    gradient = parameter.grad.clone()
    Muon([parameter], rate=0.1).step(scale=0.5)
    assert (parameter * gradient).sum((-2, -1)).max() < 0
    assert parameter.grad is None
