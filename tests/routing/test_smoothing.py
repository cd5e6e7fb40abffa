"""Smoothing against a plain loop: each token leans towards its predecessor's experts."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from engine.kernels.router import RouterConfig
from engine.kernels.topk import route
from engine.routing.smoothing import Smoother, favour, waves

CHOOSE = partial(route, router=RouterConfig.softmax(2, renormalise=True))
NONE = -1


def oracle(logits_TE, lengths, previous_SK, bonus):
    """Walk each chunk token by token."""
    ids, weights, row = [], [], 0
    for length, previous in zip(lengths, previous_SK.tolist(), strict=True):
        for _ in range(length):
            logits_E = logits_TE[row].clone()
            for expert in previous:
                if expert != NONE:
                    logits_E[expert] += bonus
            chosen = CHOOSE(logits_E[None])
            previous = chosen.topk_ids_TK[0].tolist()
            ids.append(previous)
            weights.append(chosen.topk_weights_TK[0])
            row += 1
    return torch.tensor(ids).reshape(-1, 2), weights


def case(lengths, num_experts=6, num_layers=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(sum(lengths), num_experts, generator=generator)
    previous = torch.randint(0, num_experts - 1, (len(lengths), num_layers, 1), generator=generator)
    return logits, torch.cat([previous, previous + 1], -1)


@pytest.mark.parametrize("lengths", [(1,), (1, 1, 1), (5,), (3, 1, 7), (1, 2)])
@pytest.mark.parametrize("bonus", [0.3, 2.0])
def test_rows_are_chosen_as_a_loop_over_tokens_would(lengths, bonus):
    logits, previous = case(lengths)
    previous[0, 1] = NONE
    smoother = Smoother(bonus, lengths, previous)
    for layer in range(3):
        chosen = smoother.select(CHOOSE, logits, layer)
        ids, weights = oracle(logits, lengths, previous[:, layer], bonus)
        assert torch.equal(chosen.topk_ids_TK, ids)
        assert torch.equal(chosen.topk_weights_TK, torch.stack(weights))
        last = torch.tensor(lengths).cumsum(0) - 1
        assert torch.equal(smoother.previous_SLK[:, layer], ids[last])


def test_the_oracle_tells_a_smoother_without_bonus_or_memory_apart():
    logits, previous = case((4, 6))
    ids, _ = oracle(logits, (4, 6), previous[:, 0], 2.0)
    assert not torch.equal(CHOOSE(logits).topk_ids_TK, ids)
    forgetful = favour(logits, previous[[0] * 4 + [1] * 6, 0], 2.0)
    assert not torch.equal(CHOOSE(forgetful).topk_ids_TK, ids)


def test_alternating_noise_makes_tokens_jump_and_smoothing_holds_them():
    noise = 0.2 * (1 - 2 * (torch.arange(20) % 2))
    logits = torch.zeros(20, 4)
    logits[:, 0], logits[:, 1], logits[:, 2] = 3.0, 1.0 + noise, 1.0 - noise
    restless = CHOOSE(logits).topk_ids_TK[:, 1].tolist()
    assert restless == [1, 2] * 10
    unknown = torch.full((1, 1, 2), NONE)
    calm = Smoother(0.5, [20], unknown).select(CHOOSE, logits, 0)
    assert set(calm.topk_ids_TK[:, 1].tolist()) == {1}


def test_the_callers_memory_is_not_written_to():
    logits, previous = case((2, 2))
    before = previous.clone()
    Smoother(1.0, (2, 2), previous).select(CHOOSE, logits, 0)
    assert torch.equal(previous, before)


def test_bad_rows_are_counted_over_all_waves():
    logits, previous = case((3, 2))
    logits[0, 0] = logits[4, 1] = torch.nan
    assert Smoother(1.0, (3, 2), previous).select(CHOOSE, logits, 0).bad_rows == 2


def test_the_examples_hold():
    given = favour(torch.tensor([[1.0, 0, 0]]), torch.tensor([[2, NONE]]), 0.5)
    assert given.tolist() == [[1, 0, 0.5]]
    found = [(rows.tolist(), chunks.tolist()) for rows, chunks in waves([3, 1])]
    assert found == [([0, 3], [0, 1]), ([1], [0]), ([2], [0])]
    assert waves([]) == []
