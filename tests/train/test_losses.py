"""Losses against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from engine.train.losses import (
    BALANCE_WEIGHT,
    Z_WEIGHT,
    balance_loss,
    distillation_loss,
    next_token_loss,
    router_loss,
    z_loss,
)
from engine.train.network import Routing

LOG3 = math.log(3.0)


def test_next_token_loss_is_the_mean_surprise_in_nats() -> None:
    # Probabilities [.75, .25] and [.5, .5]; targets 1 and 0.
    logits = torch.tensor([[[LOG3, 0.0], [2.0, 2.0]]])
    loss = next_token_loss(logits, torch.tensor([[1, 0]]))
    assert loss.item() == pytest.approx((math.log(4) + math.log(2)) / 2)


def test_distillation_is_lowest_at_the_teacher_and_equals_its_entropy_there() -> None:
    teacher = torch.tensor([[[LOG3, 0.0]]])
    entropy = 0.75 * math.log(4 / 3) + 0.25 * math.log(4)
    assert distillation_loss(teacher, teacher).item() == pytest.approx(entropy)
    assert distillation_loss(torch.zeros(1, 1, 2), teacher).item() == pytest.approx(math.log(2))


def test_balance_loss_of_the_worked_example() -> None:
    logits = torch.tensor([[LOG3, 0.0], [LOG3, 0.0]])
    assert balance_loss(logits, torch.tensor([[0], [0]])).item() == pytest.approx(1.5)


def test_balance_loss_is_one_for_even_use_and_looks_at_the_whole_batch() -> None:
    # Each "language" uses one expert only; over the batch that is even.
    logits = torch.tensor([[4.0, 0.0], [0.0, 4.0]])
    assert balance_loss(logits, torch.tensor([[0], [1]])).item() == pytest.approx(1.0)
    per_sequence = [balance_loss(logits[i : i + 1], torch.tensor([[i]])).item() for i in (0, 1)]
    assert min(per_sequence) > 1.9


def test_balance_loss_pushes_probability_away_from_the_crowded_expert() -> None:
    logits = torch.zeros(4, 2, requires_grad=True)
    torch.autograd.backward(balance_loss(logits, torch.tensor([[0], [0], [0], [1]])))
    assert logits.grad is not None
    assert (logits.grad[:, 0] > 0).all() and (logits.grad[:, 1] < 0).all()


def test_z_loss_is_the_squared_log_of_the_denominator() -> None:
    logits = torch.tensor([[0.0, 0.0], [math.log(4), math.log(4)]])
    expected = (math.log(2) ** 2 + math.log(8) ** 2) / 2
    assert z_loss(logits).item() == pytest.approx(expected)


def test_router_loss_weighs_both_and_averages_layers() -> None:
    even = Routing(torch.zeros(2, 2), torch.tensor([[0], [1]]))
    crowded = Routing(torch.tensor([[LOG3, 0.0]] * 2), torch.tensor([[0], [0]]))
    balance = BALANCE_WEIGHT * (1.0 + 1.5) / 2
    size = Z_WEIGHT * (math.log(2) ** 2 + math.log(4) ** 2) / 2
    assert router_loss([even, crowded]).item() == pytest.approx(balance + size)
    assert router_loss([]).item() == 0.0
