"""The exercises of `01_what_is_routed`: route by hand, foresee a ban, measure the overhead."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from engine.events import ROUTING_STAGES
from workbench.lessons.exercises.base import CannotRun, Exercise, NotYet, ask, described
from workbench.lessons.small import Run, SmallEngine

TOLERANCE = 1e-4


def route_by_hand(answer: Any, run: Run) -> str:
    """Check `answer(logits, k) -> (ids, weights)` on invented logits and on the run's own."""
    for logits, k in _cases(run):
        ids, weights = _pair(ask(answer, logits.copy(), k), k)
        _compare(ids, weights, logits.tolist(), k)
    recorded = run.trace.decisions
    for decision in recorded:
        k = len(decision.topk_ids)
        ids, weights = _pair(ask(answer, decision.logits.astype(np.float64), k), k)
        if ids != decision.topk_ids.tolist() and decision.margin > TOLERANCE:
            raise NotYet(f"For token {decision.position} the engine chose {decision.topk_ids}.")
    return (
        f"Your router agrees with the engine on all {len(recorded)} decisions of the run, and on "
        "invented ones."
    )


def foresee_ban(answer: Any, small: SmallEngine, before: Run, layer: int, expert: int) -> str:
    """Check who stands in for a banned expert, by banning it."""
    if not isinstance(answer, Mapping):
        raise CannotRun(
            "The answer must be a dict from token position to expert, such as {1: 0}; "
            f"it is {described(answer)}."
        )
    with small.banned(layer, expert):
        after = small.run(list(_prompt(before)), max_tokens=0)
    found = {}
    for position, old in _choices(before, layer).items():
        if expert in old:
            (found[position],) = set(_choices(after, layer)[position]) - set(old)
    missing = sorted(found.keys() - answer.keys())
    if missing:
        raise NotYet(
            f"Token {missing[0]} used expert {expert} too; {len(found)} tokens of the prompt did."
        )
    extra = sorted(answer.keys() - found.keys())
    if extra:
        raise NotYet(f"Token {extra[0]} did not use expert {expert} and changes nothing.")
    wrong = [position for position in found if answer[position] != found[position]]
    if not wrong:
        return (
            f"The engine banned expert {expert} in layer {layer} just now, and all {len(found)} "
            "stand-ins are the ones you named."
        )
    at = wrong[0]
    old = _choices(before, layer)[at]
    if answer[at] == expert:
        raise NotYet(f"Expert {expert} is the banned one; who comes instead?")
    if answer[at] in old:
        raise NotYet(f"Expert {answer[at]} was chosen for token {at} already, beside {expert}.")
    raise NotYet(
        f"Right for {len(found) - len(wrong)} of {len(found)}. For token {at} it is not "
        f"expert {answer[at]}: which of the experts not chosen had the highest score?"
    )


def measure_overhead(answer: Any, run: Run) -> str:
    """Check `answer(steps) -> share` on invented steps and on the run's own."""
    invented = pd.DataFrame(
        {
            "step_ms": [1.0, 9.0, 10.0],
            "select_ms": [0.1, 0.1, 0.3],
            "place_ms": [0.0, 0.05, 0.1],
            "sort_ms": [0.1, 0.05, 0.2],
            "plan_ms": [0.0, 0.0, 0.0],
            "format_ms": [0.0, 0.0, 0.0],
            "dispatch_ms": [0.2, 0.1, 0.1],
            "gate_ms": [0.2, 0.3, 0.3],
            "experts_ms": [0.3, 4.0, 5.0],
        }
    )
    for steps in (invented, _steps(run)):
        _compare_share(_number(ask(answer, steps.copy())), steps)
    share = _share(_steps(run), ROUTING_STAGES)
    return f"Routing cost {share:.1%} of this run's time."


EXERCISES = (
    Exercise(
        name="route by hand",
        blank="""
def my_router(logits, k):
    # logits: a numpy array, one number for each expert. Return ids and weights, best first.
    return None


answer = my_router
""",
        solution="""
def my_router(logits, k):
    scores = np.exp(logits - logits.max())
    ids = np.argsort(-scores, kind="stable")[:k]
    return ids, scores[ids] / scores[ids].sum()


answer = my_router
""",
        verify=route_by_hand,
    ),
    Exercise(
        name="foresee the ban",
        blank="""
# Token position -> the expert that stands in, such as {3: 0, 7: 1}
answer = None
""",
        solution="""
answer = {
    decision.position: decision.runner_up
    for decision in before.trace.decisions
    if decision.layer == layer and banned in decision.topk_ids
}
""",
        verify=foresee_ban,
    ),
    Exercise(
        name="measure the overhead",
        blank="""
def overhead_share(steps):
    # steps: a table, one line a step; columns step_ms, select_ms, place_ms, sort_ms, …
    return None


answer = overhead_share
""",
        solution="""
def overhead_share(steps):
    routing = steps["select_ms"] + steps["place_ms"] + steps["sort_ms"]
    return routing.sum() / steps["step_ms"].sum()


answer = overhead_share
""",
        verify=measure_overhead,
    ),
)


# --- route by hand --------------------------------------------------------------------------------


def _cases(run: Run) -> list[tuple[np.ndarray, int]]:
    """Return logits and k: invented ones, at sizes a solution for one size gets wrong."""
    rng = np.random.default_rng(11)
    cases = [(rng.normal(size=experts) * 3, k) for experts, k in ((8, 2), (5, 1), (16, 4), (3, 3))]
    return [(np.array([2.0, 1.0, 0.0, -1.0]), 2), (np.array([900.0, 899.0, 0.0]), 2), *cases]


def _pair(found: Any, k: int) -> tuple[list[int], list[float]]:
    try:
        ids, weights = found
        ids = [int(expert) for expert in ids]
        weights = [float(weight) for weight in weights]
    except (TypeError, ValueError):
        raise CannotRun(
            f"Your function must return two lists, ids and weights; it gave {described(found)}."
        ) from None
    if len(ids) != k or len(weights) != k:
        raise NotYet(f"For k = {k} it gave {len(ids)} ids and {len(weights)} weights.")
    return ids, weights


def _compare(ids: list[int], weights: list[float], logits: list[float], k: int) -> None:
    """Hold one answer against sorting and exponentials, without numpy."""
    order = sorted(range(len(logits)), key=lambda expert: (-logits[expert], expert))
    if ids != order[:k]:
        if sorted(ids) == sorted(order[:k]):
            raise NotYet("The right experts, but the best one must come first.")
        if sorted(ids) == sorted(order[-k:]):
            raise NotYet("These are the experts with the lowest logits; the highest are wanted.")
        raise NotYet(f"For logits {_short(logits)} and k = {k} the experts are {order[:k]}.")
    top = max(logits)
    powers = [math.exp(logit - top) for logit in logits]
    chosen = [powers[expert] for expert in ids]
    right = [power / sum(chosen) for power in chosen]
    if any(math.isnan(weight) for weight in weights):
        raise NotYet(
            "A weight is not a number: exp overflows for large logits; subtract the largest first."
        )
    if all(abs(a - b) <= TOLERANCE for a, b in zip(weights, right, strict=True)):
        return
    if all(abs(w - p / sum(powers)) <= TOLERANCE for w, p in zip(weights, chosen, strict=True)):
        raise NotYet(
            f"These are the scores of the chosen; they sum to {sum(weights):.3f}. Divide by that, "
            "so that the weights sum to 1."
        )
    raise NotYet(
        f"For logits {_short(logits)} and k = {k} the weights are "
        f"{[round(weight, 3) for weight in right]}; you gave {[round(w, 3) for w in weights]}."
    )


def _short(logits: list[float]) -> list[float]:
    return [round(logit, 2) for logit in logits]


# --- foresee the ban ------------------------------------------------------------------------------


def _prompt(run: Run) -> list[tuple[str, str]]:
    return [("", run.tokenizer.decode(run.completions[0].prompt_token_ids))]


def _choices(run: Run, layer: int) -> dict[int, tuple[int, ...]]:
    """Return the experts of each prompt token of the first request, by position."""
    columns, first = run.trace.columns, run.completions[0]
    place = run.trace.start.moe_layers.index(layer)
    return {
        int(columns["rows/positions"][row]): tuple(columns["rows/topk_ids"][row, place].tolist())
        for row in run.trace.rows_of(first.request_id)
        if columns["rows/positions"][row] < len(first.prompt_token_ids)
    }


# --- measure the overhead -------------------------------------------------------------------------


def _steps(run: Run) -> pd.DataFrame:
    """Return one line per step with its time and that of each stage, in milliseconds."""
    from engine.events import STAGES

    stage_ms = run.trace.columns["steps/stage_ms"]
    times = {"step_ms": run.trace.columns["steps/duration_ms"]}
    return pd.DataFrame(
        times | {f"{stage}_ms": np.nan_to_num(stage_ms[:, at]) for at, stage in enumerate(STAGES)}
    )


def _share(steps: pd.DataFrame, stages: tuple[str, ...]) -> float:
    routing = sum(float(value) for stage in stages for value in steps[f"{stage}_ms"])
    return routing / sum(float(value) for value in steps["step_ms"])


def _number(found: Any) -> float:
    try:
        return float(found)
    except (TypeError, ValueError):
        raise CannotRun(
            f"Your function must return one number; it gave {described(found)}."
        ) from None


def _compare_share(share: float, steps: pd.DataFrame) -> None:
    right = _share(steps, ROUTING_STAGES)
    if math.isclose(share, right, rel_tol=1e-6):
        return
    if math.isclose(share, 100 * right, rel_tol=1e-6):
        raise NotYet("That is in per cent; give a share between 0 and 1.")
    each = sum(steps[f"{stage}_ms"] for stage in ROUTING_STAGES) / steps["step_ms"]
    if math.isclose(share, float(each.mean()), rel_tol=1e-6):
        raise NotYet(
            "That is the mean of the steps' shares, in which a short step counts as much as a long "
            "one. Sum first, then divide."
        )
    if math.isclose(share, _share(steps, ("gate", *ROUTING_STAGES)), rel_tol=1e-6):
        raise NotYet(
            "The gate's product is a part of the model, it runs with or without our router; only "
            f"{', '.join(ROUTING_STAGES)} decide."
        )
    raise NotYet(
        f"For {len(steps)} steps it gave {share:.4f}. Sum {', '.join(ROUTING_STAGES)} over all "
        "steps, and divide by the sum of step_ms."
    )
