"""Smoothing against a plain loop: each token leans towards what its sequence used lately."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from engine.errors import RoutingError
from engine.kernels.router import RouterConfig
from engine.kernels.topk import route
from engine.routing.smoothing import MAX_WINDOW, NEVER, WIDTH, Smoother, Smoothing, windows

CHOOSE = partial(route, router=RouterConfig.softmax(2, renormalise=True))
LAYERS, EXPERTS = 3, 6


def oracle(logits_TE, lengths, ages_SE, smoothing):
    """Walk each chunk token by token; return ids, weights and the ages after each chunk."""
    ids, weights, after, row = [], [], [], 0
    for length, ages in zip(lengths, ages_SE.tolist(), strict=True):
        for _ in range(length):
            logits_E = logits_TE[row].clone()
            for expert, age in enumerate(ages):
                if age <= smoothing.window:
                    logits_E[expert] += smoothing.strength * smoothing.decay ** (age - 1)
            chosen = CHOOSE(logits_E[None])
            ids.append(chosen.topk_ids_TK[0].tolist())
            ages = [1 if e in ids[-1] else min(NEVER, age + 1) for e, age in enumerate(ages)]
            weights.append(chosen.topk_weights_TK[0])
            row += 1
        after.append(ages)
    return torch.tensor(ids).reshape(-1, 2), weights, torch.tensor(after)


def case(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(sum(lengths), EXPERTS, generator=generator)
    ages = torch.randint(1, 6, (len(lengths), LAYERS, EXPERTS), generator=generator)
    ages[..., 0] = NEVER
    return logits, ages


@pytest.mark.parametrize(
    "lengths", [(1,), (1, 1, 1), (5,), (3, 1, 7), (1, 2), (WIDTH + 3, 2 * WIDTH, 1)]
)
@pytest.mark.parametrize(
    "smoothing", [Smoothing(0.3), Smoothing(2.0), Smoothing(50.0), Smoothing(0.7, 4, 0.5)]
)
def test_rows_are_chosen_as_a_loop_over_tokens_would(lengths, smoothing):
    logits, ages = case(lengths)
    smoother = Smoother(smoothing, lengths, ages)
    for layer in range(LAYERS):
        chosen, bonus = smoother.select(CHOOSE, logits, layer)
        ids, weights, after = oracle(logits, lengths, ages[:, layer], smoothing)
        assert torch.equal(chosen.topk_ids_TK, ids)
        assert torch.equal(chosen.topk_weights_TK, torch.stack(weights))
        assert torch.equal(smoother.ages_SLE[:, layer], after)
        assert torch.equal(CHOOSE(logits + bonus).topk_ids_TK, ids), "the bonus it says it gave"


def test_the_oracle_tells_a_smoother_without_bonus_memory_window_or_decay_apart():
    logits, ages = case((4, 6, 30))
    right, _, _ = oracle(logits, (4, 6, 30), ages[:, 0], Smoothing(1.0, 3, 0.6))
    assert not torch.equal(CHOOSE(logits).topk_ids_TK, right)
    for other in (Smoothing(1.0, 1, 0.6), Smoothing(1.0, 3, 1.0), Smoothing(2.0, 3, 0.6)):
        assert not torch.equal(oracle(logits, (4, 6, 30), ages[:, 0], other)[0], right)
    strong, fresh = Smoothing(3.0, 3, 0.6), torch.full_like(ages[:, 0], NEVER)
    right, _, _ = oracle(logits, (4, 6, 30), ages[:, 0], strong)
    assert not torch.equal(oracle(logits, (4, 6, 30), fresh, strong)[0], right)


def test_alternating_noise_makes_tokens_jump_and_smoothing_holds_them():
    noise = 0.2 * (1 - 2 * (torch.arange(20) % 2))
    logits = torch.zeros(20, 4)
    logits[:, 0], logits[:, 1], logits[:, 2] = 3.0, 1.0 + noise, 1.0 - noise
    restless = CHOOSE(logits).topk_ids_TK[:, 1].tolist()
    assert restless == [1, 2] * 10
    unknown = torch.full((1, 1, 4), NEVER)
    calm, _ = Smoother(Smoothing(0.5), [20], unknown).select(CHOOSE, logits, 0)
    assert set(calm.topk_ids_TK[:, 1].tolist()) == {1}


def test_a_decode_step_takes_one_choice_and_a_prompt_far_fewer_than_it_has_tokens():
    logits, ages = case((1, 1, 1))
    smoother = Smoother(Smoothing(0.5), (1, 1, 1), ages)
    smoother.select(CHOOSE, logits, 0)
    assert smoother.sweeps == 1
    logits, ages = case((256,))
    smoother = Smoother(Smoothing(0.5), (256,), ages)
    smoother.select(CHOOSE, logits, 0)
    assert smoother.sweeps < 256 / 3


def test_the_callers_memory_is_not_written_to():
    logits, ages = case((2, 2))
    before = ages.clone()
    Smoother(Smoothing(1.0), (2, 2), ages).select(CHOOSE, logits, 0)
    assert torch.equal(ages, before)


def test_bad_rows_are_counted_once_over_all_sweeps():
    logits, ages = case((3, WIDTH + 2))
    logits[0, 0] = logits[4, 1] = logits[-1, 2] = torch.nan
    chosen, _ = Smoother(Smoothing(1.0), (3, WIDTH + 2), ages).select(CHOOSE, logits, 0)
    assert chosen.bad_rows == 3


def test_the_examples_hold():
    assert Smoothing(1.0, 2, 0.5).by_age()[:5] == [0, 1, 0.5, 0, 0]
    assert len(Smoothing(1.0).by_age()) == NEVER + 1
    found = [[part.tolist() for part in window] for window in windows([3, 1], width=2)]
    assert found == [[[0, 1, 3], [0, 0, 1], [0, 0, 2], [1, 2], [0, 1]], [[2], [0], [0], [0], [0]]]
    assert windows([]) == [] and not Smoothing()


@pytest.mark.parametrize(
    "wrong",
    [
        (-0.1,),
        (101.0,),
        (float("nan"),),
        (1.0, 0),
        (1.0, MAX_WINDOW + 1),
        (1.0, 1, 0.0),
        (1.0, 1, 1.5),
    ],
)
def test_what_makes_no_sense_is_refused(wrong):
    with pytest.raises(RoutingError, match="bonus|window|decay"):
        Smoothing(*wrong)
