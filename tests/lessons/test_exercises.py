"""Every exercise: its solution passes, wrong answers get a hint that fits, nothing raises."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from engine.errors import ConfigError
from workbench import lessons, views
from workbench.lessons.exercises import BY_NOTEBOOK, exercise

POSITION, LAYER = 4, 2
STEER_LAYER = 3
NAMES = [found.name for group in BY_NOTEBOOK.values() for found in group]


def solved(name: str, **notebook: object) -> object:
    """Run an exercise's solution as the notebook's cell would and return its answer."""
    exec(exercise(name).solution, notebook)
    return notebook["answer"]


def assert_hints(name: str, wrong: list[tuple[object, str]], *given: object) -> None:
    """Check that each answer is refused for its own reason, by a hint with these words."""
    assert len(wrong) >= 3
    for answer, words in wrong:
        verdict = lessons.check(name, answer, *given)
        assert verdict.outcome == "not yet", f"{answer!r}: {verdict!r}"
        assert words in verdict.text, f"{answer!r}: {verdict!r}"
        assert "still empty" not in verdict.text


def assert_cannot_run(name: str, answer: object, words: str, *given: object) -> None:
    verdict = lessons.check(name, answer, *given)
    assert (verdict.outcome, words in verdict.text) == ("could not run", True), repr(verdict)


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_answer_is_not_yet_right_and_needs_nothing_to_say_so(name):
    for empty in (None, ...):
        verdict = lessons.check(name, empty)
        assert verdict.outcome == "not yet" and "still empty" in repr(verdict)


@pytest.mark.parametrize("name", NAMES)
def test_the_blank_leaves_the_answer_to_the_learner(name):
    found = exercise(name)
    assert compile(found.blank, name, "exec") and compile(found.solution, name, "exec")
    notebook: dict = {}
    exec(found.blank, notebook)
    answer = notebook["answer"]
    assert answer is None or callable(answer)


def test_an_unknown_exercise_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="read the map.*did you mean 'read the map'"):
        lessons.check("read the mop", 1)


def test_a_solution_is_shown_as_code():
    shown = repr(lessons.solution("read the map"))
    assert shown.startswith("```python\nown = ") and shown.endswith("\n```")


def test_a_verdict_says_its_outcome_with_a_symbol_and_in_words():
    verdict = lessons.check("read the map", None)
    assert repr(verdict).startswith("○ Not yet. ")
    assert verdict._repr_markdown_().startswith("**○ Not yet.** ")


# --- 00 start here --------------------------------------------------------------------------------


def test_reading_the_stepper(run):
    given = (run, POSITION, LAYER)
    right = solved("read the stepper", run=run, position=POSITION, layer=LAYER)
    assert lessons.check("read the stepper", right, *given).outcome == "pass"
    decision, above = run.decision(POSITION, LAYER), run.decision(POSITION, LAYER + 1)
    first, second = right
    wrong = [
        ((second, first), "larger weight first"),
        (tuple(above.topk_ids.tolist()), f"its way in layer {LAYER + 1}"),
        ((first, decision.runner_up), "One of them is right"),
        ((first,), "you named 1"),
    ]
    assert_hints("read the stepper", wrong, *given)
    assert_cannot_run("read the stepper", "4 and 0", "a pair of experts", *given)


def test_reading_the_map(mixed):
    given = (mixed, "en", 3)
    shares = views.domain_load(mixed.trace)
    right = solved("read the map", shares=shares)
    assert lessons.check("read the map", right, *given).outcome == "pass"
    layer_3 = shares[shares["layer"] == 3]
    everybody = int(layer_3.groupby("expert")["rows"].sum().idxmax())
    english = shares[shares["domain"] == "en"]
    favourite = {
        layer: int(own.loc[own["rows"].idxmax(), "expert"])
        for layer, own in english.groupby("layer")
    }
    other, elsewhere = next(
        (layer, expert) for layer, expert in favourite.items() if expert not in (right, everybody)
    )
    own = english[english["layer"] == 3].set_index("expert")["rows"]
    least = int(own.drop([everybody, *favourite.values()]).idxmin())
    assert right != everybody, "choose another domain, for which the map has to be read"
    wrong = [
        (everybody, "busiest over all domains"),
        (elsewhere, f"its favourite in layer {other}"),
        (8, "from 0 to 7"),
        (least, f"{own[least]} slots went there"),
    ]
    assert_hints("read the map", wrong, *given)
    for unfit in ("2", 2.0, True):
        assert_cannot_run("read the map", unfit, "a whole number", *given)
    assert lessons.check("read the map", np.int64(right), *given).outcome == "pass"


def test_steering_with_a_text(small, mixed, prompts):
    shares = views.domain_load(mixed.trace)
    own = shares[(shares["domain"] == "py") & (shares["layer"] == STEER_LAYER)]
    target = int(own.loc[own["rows"].idxmax(), "expert"])
    given = (small, STEER_LAYER, target, prompts)
    right = solved("steer with a text")
    assert lessons.check("steer with a text", right, *given).outcome == "pass"
    python = next(text for domain, text in prompts if domain == "py")
    german = "Wir haben gestern lange über das Wetter und die neue Straße gesprochen"
    wrong = [
        (german, "this text prefers expert"),
        ("def f(self):", "at least 12"),
        (python[:5], "at least 12"),  # a piece of a text that was run, but too short before all
        (python, "part of the run already"),
        (python[: int(0.9 * len(python))], "part of the run already"),
    ]
    assert_hints("steer with a text", wrong, *given)
    assert_cannot_run("steer with a text", 7, "a text in quotes", *given)
    assert_cannot_run("steer with a text", "", "the prompt is empty", *given)
    assert_cannot_run("steer with a text", "word " * 600, "refused", *given)


# --- 01 what is routed ----------------------------------------------------------------------------


def scores_of(logits):
    scores = np.exp(logits - logits.max())
    return scores / scores.sum()


def best(logits, k):
    return np.argsort(-logits, kind="stable")[:k]


def normalised(logits, ids):
    scores = scores_of(logits)[ids]
    return scores / scores.sum()


def not_normalised(logits, k):
    return best(logits, k), scores_of(logits)[best(logits, k)]


def lowest(logits, k):
    ids = np.argsort(logits)[:k]
    return ids, normalised(logits, ids)


def best_last(logits, k):
    ids = best(logits, k)[::-1]
    return ids, normalised(logits, ids)


def overflows(logits, k):
    with np.errstate(over="ignore", invalid="ignore"):
        scores = np.exp(logits)[best(logits, k)]
        return best(logits, k), scores / scores.sum()


def only_two(logits, k):
    return best(logits, 2), normalised(logits, best(logits, 2))


def by_logits(logits, k):
    ids = best(logits, k)
    return ids, logits[ids] / logits[ids].sum()


def test_routing_by_hand(run):
    right = solved("route by hand", np=np)
    verdict = lessons.check("route by hand", right, run)
    assert verdict.outcome == "pass"
    assert f"all {len(run.trace.decisions)} decisions" in verdict.text
    wrong = [
        (not_normalised, "Divide by that"),
        (lowest, "lowest logits"),
        (best_last, "best one must come first"),
        (overflows, "not a number"),
        (only_two, "gave 2 ids"),
        (by_logits, "you gave"),
        (lambda logits, k: None, "returns nothing yet"),
    ]
    assert_hints("route by hand", wrong, run)
    assert_cannot_run("route by hand", [1, 2], "must be a function", run)
    assert_cannot_run("route by hand", lambda logits, k: 1 / 0, "ZeroDivisionError", run)
    assert_cannot_run("route by hand", lambda logits, k: 3, "two lists", run)


def test_a_router_that_agrees_on_invented_logits_only_is_caught_by_the_record(run):
    engine_sizes = Counter(len(decision.logits) for decision in run.trace.decisions)
    assert list(engine_sizes) == [8]
    recorded = {tuple(d.logits.astype(float)) for d in run.trace.decisions}

    def cheat(logits, k):
        ids = best(logits, k)
        ids = ids[::-1] if tuple(logits) in recorded else ids
        return ids, normalised(logits, ids)

    assert_hints("route by hand", [(cheat, "the engine chose")] * 3, run)


def test_foreseeing_a_ban(small, before):
    banned = int(before.trace.expert_counts()[LAYER].argmax())
    given = (small, before, LAYER, banned)
    right = solved("foresee the ban", before=before, layer=LAYER, banned=banned)
    assert lessons.check("foresee the ban", right, *given).outcome == "pass"
    assert small.control.policy.is_empty, "the check leaves no ban behind"
    assert len(right) >= 3
    at = min(right)
    (beside,) = set(before.decision(at, LAYER).topk_ids.tolist()) - {banned}
    worst = int(before.decision(at, LAYER).scores.argmin())
    unused = next(p for p in range(len(before.tokens)) if p not in right)
    wrong = [
        (dict.fromkeys(right, banned), "is the banned one"),
        ({**right, at: beside}, "was chosen for token"),
        ({**right, at: worst}, "had the highest score"),
        ({p: e for p, e in right.items() if p != at}, f"Token {at} used expert {banned} too"),
        ({**right, unused: 0}, f"Token {unused} did not use"),
    ]
    assert_hints("foresee the ban", wrong, *given)
    assert_cannot_run("foresee the ban", [1, 2], "must be a dict", *given)


def test_measuring_the_overhead(small):
    ladder = small.ladder("Der Server", (1, 2), max_tokens=6)
    verdict = lessons.check("measure the overhead", solved("measure the overhead"), ladder)
    assert verdict.outcome == "pass", repr(verdict)
    shown = float(verdict.text.split("cost ")[1].split("%")[0]) / 100
    assert shown == pytest.approx(views.overhead_total(ladder.trace)["share"].item(), abs=6e-4)

    def routing(steps):
        return steps["select_ms"] + steps["place_ms"] + steps["sort_ms"]

    wrong = [
        (lambda s: (routing(s) / s["step_ms"]).mean(), "mean of the steps' shares"),
        (lambda s: (routing(s) + s["gate_ms"]).sum() / s["step_ms"].sum(), "part of the model"),
        (lambda s: 100 * routing(s).sum() / s["step_ms"].sum(), "in per cent"),
        (lambda s: s["experts_ms"].sum() / s["step_ms"].sum(), "divide by the sum of step_ms"),
    ]
    assert_hints("measure the overhead", wrong, ladder)
    assert_cannot_run("measure the overhead", 0.1, "must be a function", ladder)
    assert_cannot_run("measure the overhead", lambda s: s["step"], "KeyError", ladder)
    assert_cannot_run("measure the overhead", lambda s: [1, 2], "one number", ladder)
