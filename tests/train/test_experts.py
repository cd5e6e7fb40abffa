"""Rows of experts: slots, fixed capacity against dropless, both against a naive loop."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.train import experts
from engine.train.experts import assign_slots, capacity, dropless, with_capacity

Case = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def case(num_tokens: int = 130, num_experts: int = 5, top_k: int = 2, skew: float = 0.0) -> Case:
    generator = torch.Generator().manual_seed(num_tokens + num_experts)
    make = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    logits = make(num_tokens, num_experts) + skew * torch.arange(num_experts)
    weights_TK, ids_TK = logits.softmax(-1).topk(top_k, dim=-1)
    gate_up, down = make(num_experts, 12, 7) / 7**0.5, make(num_experts, 7, 6) / 6**0.5
    return make(num_tokens, 7), ids_TK, weights_TK, gate_up, down


def naive(
    x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    rows = []
    for x, ids, weights in zip(x_TD, ids_TK.tolist(), weights_TK, strict=True):
        row = torch.zeros_like(x)
        for expert, weight in zip(ids, weights, strict=True):
            gate, up = (gate_up[expert] @ x).chunk(2)
            row = row + weight * (down[expert] @ (F.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    scale = torch.maximum(wanted.abs(), wanted.square().mean().sqrt())
    return float(((found - wanted).abs() / scale).max().detach())


def test_capacity_is_the_even_share_and_half_again() -> None:
    assert capacity(16384, 8) == 3072
    assert capacity(100, 8) == 64


def test_slots_of_the_worked_example() -> None:
    slots, fits = assign_slots(torch.tensor([[0], [1], [0], [0]]), num_experts=2, room=2)
    assert slots.tolist() == [[0], [2], [1], [1]]
    assert fits.tolist() == [[True], [True], [True], [False]]


def test_no_two_fitting_choices_share_a_slot() -> None:
    _, ids_TK, *_ = case(num_tokens=200, skew=1.0)
    slots, fits = assign_slots(ids_TK, num_experts=5, room=64)
    taken = slots[fits].tolist()
    assert len(taken) == len(set(taken)) < ids_TK.numel()
    assert (slots[fits] // 64 == ids_TK[fits]).all()


@pytest.mark.parametrize("run", [dropless, with_capacity])
@pytest.mark.parametrize(("num_experts", "top_k"), [(5, 2), (1, 1), (4, 4), (8, 1)])
def test_both_ways_equal_a_naive_loop_when_there_is_room(
    run: object, num_experts: int, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "CAPACITY_FACTOR", float(num_experts))
    arguments = case(num_experts=num_experts, top_k=top_k)
    wanted = naive(*arguments)
    found = run(*arguments)  # type: ignore[operator]
    assert relative_error(found, wanted) < 1e-5
    # The check can fail: for an output of zeros, and with two experts exchanged.
    assert relative_error(torch.zeros_like(found), wanted) > 0.5
    x_TD, ids_TK, weights_TK, gate_up, down = arguments
    if num_experts > 1:
        swapped = gate_up.roll(1, dims=0)
        assert relative_error(run(x_TD, ids_TK, weights_TK, swapped, down), wanted) > 0.1  # type: ignore[operator]


def test_gradients_equal_those_of_the_naive_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "CAPACITY_FACTOR", 5.0)
    for index in (0, 2, 3, 4):
        grads = []
        for run in (with_capacity, naive):
            arguments = [tensor.clone() for tensor in case()]
            arguments[index].requires_grad_(True)
            weigh = torch.linspace(-1, 1, arguments[0].numel()).view_as(arguments[0])
            torch.autograd.backward((run(*arguments) * weigh).sum())
            grads.append(arguments[index].grad)
        assert relative_error(grads[0], grads[1]) < 1e-4


def test_what_does_not_fit_adds_nothing_and_gets_no_gradient() -> None:
    x_TD, ids_TK, weights_TK, gate_up, down = case(num_tokens=400, top_k=1, skew=4.0)
    _, fits = assign_slots(ids_TK, 5, capacity(ids_TK.numel(), 5))
    dropped = ~fits.squeeze(1)
    assert 0 < dropped.sum() < 400
    x_TD.requires_grad_(True)
    y_TD = with_capacity(x_TD, ids_TK, weights_TK, gate_up, down)
    torch.autograd.backward(y_TD.sum())
    assert x_TD.grad is not None
    assert (y_TD[dropped] == 0).all() and (x_TD.grad[dropped] == 0).all()
    wanted = naive(x_TD, ids_TK, weights_TK, gate_up, down)
    assert relative_error(y_TD[~dropped], wanted[~dropped]) < 1e-5
    assert relative_error(y_TD, wanted) > 0.5


def test_no_tokens_give_no_rows() -> None:
    x_TD, ids_TK, weights_TK, gate_up, down = case()
    empty = dropless(x_TD[:0], ids_TK[:0], weights_TK[:0], gate_up, down)
    assert empty.shape == (0, 7)
