"""The small engine: what a run keeps, what a ban does, and that nothing of it stays."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from engine.errors import RequestError
from engine.train.specialisation import mutual_information
from tests.lessons.conftest import TEXT
from workbench import lessons, views
from workbench.lessons.small import Run


def test_a_single_text_is_recorded_in_full(run):
    tokens = len(run.completions[0].prompt_token_ids) + 4
    assert run.text.startswith(TEXT) and len(run.tokens) == tokens
    assert run.tokens[0] == "<|bos|>" and "".join(run.tokens[1:]) == run.text
    # The last new token has been written and not run.
    seen = {(decision.position, decision.layer) for decision in run.trace.decisions}
    assert seen == {(at, layer) for at in range(tokens - 1) for layer in range(4)}
    decision = run.decision(3, 2)
    assert (decision.position, decision.layer) == (3, 2)


def test_a_decision_that_was_not_recorded_is_refused_with_what_was(run):
    last = len(run.tokens) - 2
    with pytest.raises(RequestError, match=f"are tokens 0 to {last}, in layers 0 to 3"):
        run.decision(last + 1, 0)


def test_several_texts_keep_their_order_and_domains(small, mixed, prompts):
    assert [done.label for done in mixed.completions] == [domain for domain, _ in prompts]
    assert mixed.trace.decisions == ()
    rows = sum(done.rows for done in mixed.completions)
    assert rows == mixed.trace.num_rows, "an earlier run is forgotten"
    domains = {domain for domain, _ in prompts}
    assert len(domains) == 8 and len(prompts) == 4 * 8


def test_a_run_without_new_tokens_runs_the_prompt_alone(before):
    assert before.completions[0].token_ids == ()
    assert before.trace.num_rows == len(before.tokens)
    assert before.decision(len(before.tokens) - 1, 3).position == len(before.tokens) - 1


def test_an_empty_text_is_refused(small):
    with pytest.raises(RequestError, match="the prompt is empty"):
        small.run("")


def test_a_ladder_runs_each_batch_once(small):
    ladder = small.ladder("Der", (1, 3), max_tokens=5)
    rows = np.diff(ladder.trace.columns["steps/row_start"])
    decode = rows[ladder.trace.columns["steps/num_prefill_rows"] == 0]
    assert decode.tolist() == [1] * 4 + [3] * 4


def test_a_ban_holds_inside_the_block_and_not_behind_it(small, before):
    banned = int(before.trace.expert_counts()[1].argmax())
    with pytest.raises(ZeroDivisionError), small.banned(1, banned):
        assert small.run(TEXT, max_tokens=0).trace.expert_counts()[1, banned] == 0
        _ = 1 / 0
    again = small.run(TEXT, max_tokens=0)
    assert np.array_equal(again.trace.expert_counts(), before.trace.expert_counts())


def test_a_ban_leaves_what_was_set_before_it(small):
    small.control.set_bias(0, 1, 0.5)
    try:
        with small.banned(None, 2):
            assert (3, 2) in small.control.policy.banned
        assert small.control.policy.bias == {(0, 1): 0.5} and not small.control.policy.banned
    finally:
        small.control.clear_policy()


def test_the_effect_of_a_ban_is_the_runner_up(small, before):
    layer = 2
    banned = int(before.trace.expert_counts()[layer].argmax())
    with small.banned(layer, banned):
        after = small.run(TEXT, max_tokens=0)
    effect = lessons.ban_effect(before, after, layer, banned)
    losers = [
        d for d in before.trace.decisions if d.layer == layer and banned in d.topk_ids.tolist()
    ]
    assert len(losers) >= 3
    assert effect["position"].tolist() == [d.position for d in losers]
    assert effect["newcomer"].tolist() == [d.runner_up for d in losers]
    assert all(banned in line for line in effect["before"])
    assert not any(banned in line for line in effect["after"])


def test_runs_of_different_texts_are_not_compared(small, before):
    other = small.run("Der Server", max_tokens=0)
    with pytest.raises(RequestError, match="different prompts"):
        lessons.ban_effect(before, other, 2, 0)


def test_shuffled_domains_are_the_same_labels_on_other_texts(mixed):
    shuffled = lessons.shuffle_domains(mixed.trace, seed=1)

    def labels(trace) -> list[str]:
        return [request.label for request in trace.requests if request.kind == "added"]

    assert labels(shuffled) != labels(mixed.trace)
    assert sorted(labels(shuffled)) == sorted(labels(mixed.trace))
    by_request: dict[int, set[str]] = {}
    for _, note in shuffled.notes:
        by_request.setdefault(note.request_id, set()).add(note.label)
    assert all(len(found) == 1 for found in by_request.values()), "a text keeps one name"
    assert shuffled.columns is mixed.trace.columns
    again = lessons.shuffle_domains(mixed.trace, seed=1)
    assert labels(again) == labels(shuffled)


def test_experts_tell_more_about_true_domains_than_about_shuffled_ones(mixed):
    def bits(trace) -> float:
        frame = views.domain_load(trace)
        counts = frame[frame["layer"] == 3].pivot(index="domain", columns="expert", values="rows")
        return mutual_information(counts.to_numpy())

    assert bits(mixed.trace) > 3 * bits(lessons.shuffle_domains(mixed.trace))


def test_surprise_is_the_mean_of_minus_log2_p(small):
    texts = [("a", "Der Server"), ("b", "12 + 30"), ("a", "ist")]
    found = lessons.surprise(small, texts)
    assert found.index.tolist() == ["a", "b"]
    bits = []
    for text in ("Der Server", "ist"):
        ids = small.tokenizer.encode(text)
        for row, token in zip(small.engine.logits(ids), ids[1:], strict=False):
            row = row.astype(np.float64)
            bits.append(-np.log2(np.exp(row[token]) / np.exp(row).sum()))
    assert found["a"] == pytest.approx(np.mean(bits), rel=1e-9)


def test_a_run_is_frozen(run):
    assert dataclasses.is_dataclass(Run)
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.trace = None


def test_a_ban_costs_the_domain_that_lives_on_the_expert_and_hardly_any_other(small, mixed):
    texts = [(domain, text) for domain, text in lessons.mixed_prompts(4) if domain in ("de", "num")]
    shares = views.domain_load(mixed.trace)
    german = shares[(shares["domain"] == "de") & (shares["layer"] == 2)]
    favourite = int(german.loc[german["rows"].idxmax(), "expert"])
    free = lessons.surprise(small, texts)
    with small.banned(2, favourite):
        lost = lessons.surprise(small, texts) - free
    assert lost["de"] > 0.1 > 10 * abs(lost["num"])
    assert lessons.surprise(small, texts).equals(free)
