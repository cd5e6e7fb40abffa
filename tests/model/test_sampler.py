"""Tokens are drawn from the distribution that was asked for, by seed and position alone."""

from __future__ import annotations

import math

import pytest
import torch

from engine.config import SamplingParams
from engine.model.sampler import logprobs, sample, uniform

LOGITS = torch.tensor([1.0, 3.0, 2.0, 0.0, -2.0])


def draws(params, count=4000, logits=LOGITS):
    rows = logits.expand(count, -1)
    return sample(rows, [params] * count, [7] * count, range(count))


def frequencies(tokens, size=5):
    return torch.bincount(torch.tensor(tokens), minlength=size) / len(tokens)


def test_greedy_takes_the_most_likely_token():
    assert sample(LOGITS[None], [SamplingParams()], [0], [3]) == [1]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_frequencies_follow_the_tempered_distribution(temperature):
    got = frequencies(draws(SamplingParams(temperature=temperature)))
    wanted = torch.softmax(LOGITS / temperature, -1)
    assert (got - wanted).abs().max() < 4 * math.sqrt(0.25 / 4000)


def test_top_k_and_top_p_cut_the_tail_and_renormalise():
    got = frequencies(draws(SamplingParams(temperature=1.0, top_k=2)))
    wanted = torch.softmax(torch.tensor([3.0, 2.0]), -1)
    assert got[[0, 3, 4]].sum() == 0
    assert abs(got[1] - wanted[0]) < 0.04
    narrow = frequencies(draws(SamplingParams(temperature=1.0, top_p=0.6)))
    assert narrow[1] == 1.0
    wide = frequencies(draws(SamplingParams(temperature=1.0, top_p=0.8)))
    assert wide[[0, 3, 4]].sum() == 0 and wide[2] > 0.2


def test_a_draw_depends_on_seed_and_position_only():
    params = SamplingParams(temperature=1.0)
    alone = sample(LOGITS[None], [params], [5], [9])
    rows = torch.cat((torch.randn(6, 5), LOGITS[None], torch.randn(3, 5)))
    positions = [1, 2, 3, 4, 5, 6, 9, 7, 8, 10]
    assert sample(rows, [params] * 10, [5] * 10, positions)[6] == alone[0]
    assert len({uniform(5, position) for position in range(100)}) == 100
    assert uniform(5, 9) != uniform(6, 9)


def test_logprobs_are_those_of_the_plain_softmax():
    got = logprobs(LOGITS, 3, 2)
    wanted = torch.log_softmax(LOGITS.double(), -1)
    assert got.logprob == pytest.approx(float(wanted[3]), abs=1e-6)
    assert [token for token, _ in got.top] == [1, 2]
    assert got.top[0][1] == pytest.approx(float(wanted[1]), abs=1e-6)
    assert logprobs(LOGITS, 3, 0).top == ()
