"""The policy of drafts: what stands, what pays, when it gives up; and that nothing is distorted."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine.config import SamplingParams
from engine.model.sampler import distribution, sample
from engine.routing.draft_costs import STALE_STEPS, Confidence, Costs
from engine.routing.speculation import (
    FIRST_GAP,
    LOOKED_AT,
    TRIAL_STEPS,
    Figures,
    Speculation,
    Thought,
    Track,
    num_kept,
)
from engine.runtime.draft.drafter import propose_from
from engine.runtime.draft.rejection import _settle, draw_proposal

MS = 1e-3


def test_what_stands_ends_with_the_targets_own_token():
    assert num_kept([5, 7, 2], [5, 7, 9, 4]) == 3  # the docstring's example
    assert num_kept([5, 7, 2], [5, 7, 2, 4]) == 4
    assert num_kept([5, 7, 2], [6, 7, 2, 4]) == 1
    assert num_kept([], [4]) == 1


def test_the_figures_follow_their_definition():
    figures = Figures(proposed=10, accepted=6, steps=4)
    assert (figures.acceptance, figures.tokens_per_step) == (0.6, 2.5)
    figures.add(Figures(proposed=2, steps=2))
    assert (figures.acceptance, figures.tokens_per_step) == (0.5, 2.0)
    assert (Figures().acceptance, Figures().tokens_per_step) == (None, None)


# --- costs and chances ----------------------------------------------------------------------------


def costs(**ms_by_rows: float) -> Costs:
    known = Costs()
    for rows, ms in ms_by_rows.items():
        for _ in range(3):
            known.took_step(int(rows.removeprefix("rows")), ms * MS)
    return known


def test_step_times_lie_between_those_that_were_measured():
    known = costs(rows1=3.0, rows3=4.0)
    assert known.step_s(2) == pytest.approx(3.5 * MS)
    assert known.step_s(4) == pytest.approx(4.2 * MS)  # 5 % of 3 rows' time for each further row
    assert Costs().step_s(1) == 0.0


def test_passes_over_more_sequences_cost_more():
    known = Costs()
    known.took_pass(2, 0.4 * MS)
    assert known.pass_s(1) == known.pass_s(2) == 0.4 * MS
    assert known.pass_s(8) == pytest.approx(1.6 * MS)


def test_one_interrupted_step_decides_nothing():
    known = costs(rows1=3.0)
    known.took_step(1, 900 * MS)
    assert known.step_s(1) == pytest.approx(3.0 * MS)


def test_bad_times_are_not_believed_for_ever():
    known = costs(rows1=3.0, rows3=90.0)
    for _ in range(2 * STALE_STEPS):
        known.took_step(1, 3.0 * MS)
    assert known.step_s(3) < 5 * MS


def test_a_class_of_confidence_learns_what_its_proposals_come_to():
    chances = Confidence()
    assert chances.chance(0.99) > 0.9 and chances.chance(0.05) < 0.1
    for _ in range(200):
        chances.judged(0.99, False)
        chances.judged(0.05, True)
    assert chances.chance(0.99) < 0.05 and chances.chance(0.05) > 0.95
    assert all(0 <= line["chance"] <= 1 for line in chances.table())


# --- lengths --------------------------------------------------------------------------------------


def policy(longest: int = 4, *, row_ms: float = 0.3, **options) -> Speculation:
    """A policy that knows its times: 3 ms a step, `row_ms` a further row, 0.2 ms a pass."""
    made = Speculation(longest, **options)
    for rows in (1, 2, 3, 5):
        for _ in range(3):
            made.costs.took_step(rows, (3 + row_ms * (rows - 1)) * MS)
    made.costs.took_pass(1, 0.2 * MS)
    return made


def thoughts(*chances: float) -> list[Thought]:
    return [Thought(7, chance, chance) for chance in chances]


def test_a_token_is_proposed_while_its_chance_is_worth_its_row():
    # A token is worth 3 ms and a row costs 0.3: it pays from a chance of 0.1 on.
    assert policy().lengths([thoughts(0.9, 0.5, 0.2, 0.05)], room=99) == [3]
    assert policy().lengths([thoughts(0.08)], room=99) == [0]
    assert policy(row_ms=2.0).lengths([thoughts(0.9, 0.5, 0.2, 0.05)], room=99) == [1]


def test_prices_kept_until_another_time_is_measured_decide_as_prices_worked_out_each_time():
    kept, each = policy(), policy()
    each.ahead = False
    answers = []
    for row_ms in (0.3, 2.0, 2.6, 0.1, 0.1):
        for made in (kept, each):
            for rows in (1, 2, 3, 5) * 9:
                made.costs.took_step(rows, (3 + row_ms * (rows - 1)) * MS)
            drafts = [thoughts(0.9, 0.5, 0.2, 0.05), thoughts(0.6)]
            worth = [made.worth_thinking(Track(), chance / 10, 2) for chance in range(10)]
            answers.append((made.lengths(drafts, 9), made.lengths(drafts[:1], 9), worth))
        assert answers[-2] == answers[-1]
    assert len({str(answer) for answer in answers}) > 2, "the times matter"


def test_no_more_rows_are_taken_than_there_is_room_for():
    assert policy().lengths([thoughts(0.9, 0.8)], room=1) == [1]
    assert policy().lengths([thoughts(0.9)], room=0) == [0]
    fixed = policy(3, adaptive=False)
    assert fixed.lengths([thoughts(0.1, 0.1, 0.1), thoughts(0.1)], room=3) == [2, 1]
    assert fixed.lengths([thoughts(0.0, 0.0), []], room=99) == [2, 0]


def test_the_likeliest_tokens_of_a_batch_come_first():
    made = policy(row_ms=1.0)  # a token of 2 sequences is worth 2 ms, a row costs 1
    assert made.lengths([thoughts(0.9, 0.8), thoughts(0.3, 0.1)], room=99) == [2, 0]


def test_a_draft_is_not_asked_when_the_sequence_goes_badly():
    made = policy()
    assert made.worth_thinking(Track(ease=0.7), 1.0, 1)
    assert not made.worth_thinking(Track(ease=0.1), 1.0, 1)
    assert not made.worth_thinking(Track(ease=0.7), 0.1, 1)


# --- switching off and on -------------------------------------------------------------------------


def write(made: Speculation, track: Track, chance: float, num_tokens: int, seed: int = 0) -> float:
    """Let a sequence write `num_tokens`, proposals accepted by `chance`; seconds beside plain."""
    numbers = np.random.default_rng(seed)
    extra_s, written = 0.0, 0
    while written < num_tokens:
        accepted = 0
        if track.on:
            length = 2
            while accepted < length and numbers.random() < chance:
                accepted += 1
            spent_s = length * 0.2 * MS + made.costs.step_s(1 + length) - made.costs.step_s(1)
            extra_s += spent_s - accepted * made.costs.step_s(1)
            made.judge(thoughts(0.6, 0.5), length, accepted)
            made.weigh(track, accepted, spent_s, 1, written)
        written += accepted + 1
    return extra_s


@pytest.mark.parametrize("seed", range(5))
def test_a_losing_sequence_is_left_alone_within_fifty_tokens(seed):
    made, track = policy(row_ms=1.2), Track()
    lost_s = write(made, track, 0.1, 400, seed)
    assert not track.on
    (at, on), *_ = track.switched
    assert at <= 50 and not on
    assert lost_s < 0.1 * 400 * 3 * MS  # all of it before it was switched off


@pytest.mark.parametrize("seed", range(5))
def test_a_gaining_sequence_goes_on(seed):
    made, track = policy(), Track()
    assert write(made, track, 0.85, 400, seed) < 0
    assert track.on and track.steps > TRIAL_STEPS


def test_a_policy_that_never_gives_up_would_be_caught():
    made, track = policy(row_ms=1.2, adaptive=False), Track()
    write(made, track, 0.1, 400)
    assert track.on


def test_after_many_trials_that_lost_new_sequences_are_looked_at_first():
    made = policy(row_ms=1.2)
    assert made.new_track().on
    for seed in range(5):
        write(made, Track(), 0.1, 60, seed)
    new = made.new_track()
    assert not new.on and new.look_at == LOOKED_AT
    for seed in range(5):
        write(made, Track(), 1.0, 200, seed)
    assert made.new_track().on


def test_large_batches_have_no_drafts():
    made = policy()
    for _ in range(3):
        made.costs.took_step(9, 6 * MS)
    assert made.wants(1) and not made.wants(9)
    assert policy(adaptive=False).wants(9)


def test_a_look_back_switches_on_what_would_have_gained():
    made, track = policy(), Track(on=False)
    made.look(track, [0.9] * LOOKED_AT, [True] * LOOKED_AT, 200)
    assert track.on and track.switched == [(200, True)]


def test_looks_that_promise_nothing_become_rare():
    made, track = policy(), Track(on=False, look_at=FIRST_GAP)
    looked = []
    for tokens in range(4000):
        if made.looks(track, tokens):
            looked.append(tokens)
            made.look(track, [0.5] * LOOKED_AT, [False] * LOOKED_AT, tokens)
    assert not track.on and looked[:3] == [FIRST_GAP, 3 * FIRST_GAP, 7 * FIRST_GAP]
    assert len(looked) < 15


# --- the distribution -----------------------------------------------------------------------------

VOCABULARY = 6
Rule = Callable[[int, SamplingParams, int, int], list[int]]
PARAMS = {
    "plain": SamplingParams(temperature=1.0),
    "tempered": SamplingParams(temperature=0.6),
    "top-k": SamplingParams(temperature=1.2, top_k=3),
    "top-p": SamplingParams(temperature=0.9, top_p=0.8),
}


def bigrams(seed: int) -> np.ndarray:
    """A model of 6 tokens: the logits after each one, and after the prompt in the last row."""
    return np.random.default_rng(seed).normal(0, 1.2, (VOCABULARY + 1, VOCABULARY)).astype("f4")


TARGET, DRAFT = bigrams(1), bigrams(1) * 0.7 + bigrams(2) * 0.5


def exact(logits_V: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution that temperature, top-k and top-p leave, worked out plainly."""
    order = np.argsort(-logits_V, kind="stable")
    order = order[: params.top_k or VOCABULARY]
    shares = np.exp(logits_V[order].astype("f8") / params.temperature)
    shares /= shares.sum()
    kept = order[: int(np.searchsorted(np.cumsum(shares), params.top_p)) + 1]
    out = np.zeros(VOCABULARY)
    out[kept] = shares[: len(kept)] / shares[: len(kept)].sum()
    return out


def same(state: int, params: SamplingParams, seed: int, at: int) -> list[int]:
    """Go on by one step: the draft's likeliest token stands when the target draws it."""
    draft, _ = propose_from(DRAFT[state], params)
    drawn = target_draws([state, draft], params, seed, at)
    return drawn[: num_kept([draft], drawn)]


def rejection(state: int, params: SamplingParams, seed: int, at: int) -> list[int]:
    """Go on by one step: a drawn token stands by chance."""
    draft, shares_V = draw_proposal(DRAFT[state], params, seed, at)
    drawn = target_draws([state, draft], params, seed, at)
    kept = _settle([Thought(draft, 0, 0, shares_V)], TARGET[[state]], params, seed, at)
    drawn[: len(kept)] = kept
    return drawn[: num_kept([draft], drawn)]


def typical(state: int, params: SamplingParams, seed: int, at: int) -> list[int]:
    """A wrong rule: whatever the target finds likely stands."""
    draft, _ = propose_from(DRAFT[state], params)
    if exact(TARGET[state], params)[draft] > 0.05:
        return [draft]
    return target_draws([state], params, seed, at)


def careless(state: int, params: SamplingParams, seed: int, at: int) -> list[int]:
    """A wrong rule: what is rejected is drawn anew from the whole distribution."""
    draft, shares_V = draw_proposal(DRAFT[state], params, seed, at)
    if _settle([Thought(draft, 0, 0, shares_V)], TARGET[[state]], params, seed, at) == [draft]:
        return [draft]
    return target_draws([state], params, seed, at)


def target_draws(states: list[int], params: SamplingParams, seed: int, at: int) -> list[int]:
    count = len(states)
    positions = list(range(at, at + count))
    return sample(torch.from_numpy(TARGET[states]), [params] * count, [seed] * count, positions)


def pair(rule: Rule, params: SamplingParams, seed: int) -> tuple[int, int]:
    """Write two tokens, a draft of one before each step of the target."""
    out = [VOCABULARY]
    while len(out) < 3:
        out += rule(out[-1], params, seed, len(out) - 1)
    return out[1], out[2]


def deviation(rule: Rule, params: SamplingParams, count: int = 1500) -> float:
    """How many standard deviations chi-square lies above its mean, over all pairs."""
    seen = np.zeros((VOCABULARY, VOCABULARY))
    for seed in range(count):
        seen[pair(rule, params, seed)] += 1
    first = exact(TARGET[VOCABULARY], params)
    wanted = count * first[:, None] * np.stack([exact(row, params) for row in TARGET[:-1]])
    assert not seen[wanted == 0].any(), "a token came that the sampler cuts off"
    common = wanted >= 5
    rest_seen, rest_wanted = seen[~common].sum(), wanted[~common].sum()
    chi = (((seen - wanted) ** 2)[common] / wanted[common]).sum()
    chi += (rest_seen - rest_wanted) ** 2 / max(rest_wanted, 1)
    freedom = int(common.sum())
    return float((chi - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize("rule", [same, rejection])
@pytest.mark.parametrize("name", PARAMS)
def test_sampling_with_a_draft_has_the_targets_distribution(name, rule):
    assert deviation(rule, PARAMS[name]) < 4


@pytest.mark.parametrize("rule", [typical, careless])
def test_a_rule_that_bends_the_distribution_is_caught(rule):
    assert deviation(rule, PARAMS["plain"]) > 10


@pytest.mark.parametrize("name", PARAMS)
def test_the_distribution_is_what_the_sampler_draws_by(name):
    for logits_V in TARGET:
        np.testing.assert_allclose(
            distribution(logits_V, PARAMS[name]), exact(logits_V, PARAMS[name]), atol=1e-6
        )
    equal = np.array([1, 3, 2, 3], "f4")
    halves = distribution(equal, SamplingParams(temperature=1.0, top_k=2))
    assert halves.tolist() == [0, 0.5, 0, 0.5]


def test_more_proposals_stand_by_chance_and_as_many_as_can():
    params = PARAMS["plain"]
    p, q = exact(TARGET[VOCABULARY], params), exact(DRAFT[VOCABULARY], params)
    runs = {rule: [len(rule(VOCABULARY, params, s, 0)) for s in range(600)] for rule in RULES}
    stood = {rule: np.mean(run) - 1 for rule, run in runs.items()}
    assert stood[rejection] == pytest.approx(np.minimum(p, q).sum(), abs=0.06)
    assert stood[same] == pytest.approx(p[q.argmax()], abs=0.06)
    assert stood[same] < stood[rejection]


RULES = (same, rejection)
