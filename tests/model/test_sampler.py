"""Tokens are drawn from the distribution that was asked for, by seed and position alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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


def walked(logits, params, share, tie=1):
    """The plain definition: rank all tokens, cut by k, cut by p, walk down to the share."""
    scaled = [np.float32(logit) / np.float32(params.temperature) for logit in logits]
    ranked = sorted(range(len(scaled)), key=lambda token: (-scaled[token], tie * token))
    ranked = ranked[: params.top_k or None]
    weights = [math.exp(float(scaled[token]) - float(scaled[ranked[0]])) for token in ranked]
    total = sum(weights)
    kept, mass = [], 0.0
    for token, weight in zip(ranked, weights, strict=True):
        kept.append((token, weight / total))
        mass += kept[-1][1]
        if mass > params.top_p:
            break
    reached = 0.0
    for token, probability in kept:
        reached += probability
        if share * mass < reached:
            return token
    return kept[-1][0]


cases = st.tuples(
    # halves between -3 and 3: most rows hold equals, also at the edges that k and p cut
    st.lists(st.integers(-6, 6).map(lambda half: half / 2), min_size=1, max_size=24),
    st.sampled_from([0.3, 0.8, 1.0, 2.5]),
    st.integers(0, 26),
    st.sampled_from([0.001, 0.37, 0.81, 0.95, 1.0]),
    st.integers(0, 2**32),
)


@settings(max_examples=400, deadline=None)
@given(cases)
def test_every_draw_is_that_of_the_plain_definition(case):
    logits, temperature, top_k, top_p, seed = case
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    drawn = sample(torch.tensor(logits)[None], [params], [seed], [3])
    assert drawn == [walked(logits, params, uniform(seed, 3))]


def test_among_equals_the_lowest_id_stands_first():
    flat, narrow = torch.zeros(64), SamplingParams(temperature=1.0, top_k=7)
    assert set(draws(narrow, 500, flat)) == set(range(7))
    shares = [uniform(7, position) for position in range(500)]
    assert draws(narrow, 500, flat) == [walked([0.0] * 64, narrow, share) for share in shares]
    other_way = [walked([0.0] * 64, narrow, share, tie=-1) for share in shares]
    assert draws(narrow, 500, flat) != other_way, "the order of equals would go unseen"


def test_a_whole_vocabulary_is_drawn_from_as_a_stable_sort_would():
    logits_BV = torch.randn(40, 4096, generator=torch.Generator().manual_seed(2)) * 3
    for params in (
        SamplingParams(temperature=0.8, top_p=0.95),
        SamplingParams(temperature=1.3),
        SamplingParams(temperature=0.7, top_k=40, top_p=0.9),
    ):
        drawn = sample(logits_BV, [params] * 40, [1] * 40, range(40))
        assert drawn == [
            walked(logits_V, params, uniform(1, position))
            for position, logits_V in enumerate(logits_BV.tolist())
        ]
        assert len(set(drawn)) > 20


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_without_a_finite_largest_give_the_greedy_token(bad):
    logits = torch.full((1, 5), -math.inf)
    logits[0, 3] = bad
    greedy = sample(logits, [SamplingParams()], [0], [0])
    assert sample(logits, [SamplingParams(temperature=1.0, top_p=0.5)], [0], [0]) == greedy


def test_a_temperature_next_to_nothing_is_greedy_and_tokens_of_no_mass_are_never_drawn():
    for temperature in (1e-30, 1e-46):
        assert set(draws(SamplingParams(temperature=temperature), 50)) == {1}
    only = torch.full((5,), -math.inf)
    only[2] = 0.5
    assert set(draws(SamplingParams(temperature=100.0), 50, only)) == {2}
