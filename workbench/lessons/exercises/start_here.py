"""The exercises of `00_start_here`: read the stepper, read the map, steer with a text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from engine.errors import RequestError
from workbench.lessons.exercises.base import CannotRun, Exercise, NotYet, described, whole
from workbench.lessons.small import Labelled, Run, SmallEngine
from workbench.theme import domain_name

MIN_TOKENS = 12
WANTED_SHARE = 0.5


def read_stepper(answer: Any, run: Run, position: int, layer: int) -> str:
    """Check the experts one token went to in one layer, best first."""
    if not isinstance(answer, tuple | list):
        raise CannotRun(
            f"The answer must be a pair of experts such as (0, 1); it is {described(answer)}."
        )
    said = tuple(whole(expert, "a pair of experts") for expert in answer)
    place = run.trace.start.moe_layers.index(layer)
    ways = _ways(run, position)
    right = ways[place]
    if said == right:
        return (
            f"Token {position}, {run.tokens[position]!r}, went to expert {right[0]} first and "
            f"to {right[1]} second in layer {layer}."
        )
    if len(said) != len(right):
        raise NotYet(f"Each token goes to {len(right)} experts here; you named {len(said)}.")
    if sorted(said) == sorted(right):
        raise NotYet("These are the two; now put the one with the larger weight first.")
    if said in ways:
        other = run.trace.start.moe_layers[ways.index(said)]
        raise NotYet(f"That is its way in layer {other}; press ↓ until the stepper says {layer}.")
    if set(said) & set(right):
        raise NotYet("One of them is right. The other may be the runner-up: it was not chosen.")
    raise NotYet(f"Press → until token {position} is in focus, then ↓ until layer {layer} is.")


def read_map(answer: Any, run: Run, domain: str, layer: int) -> str:
    """Check which expert a domain uses most in a layer."""
    said = whole(answer, "the number of an expert")
    num_experts = run.trace.start.num_experts
    if not 0 <= said < num_experts:
        raise NotYet(f"Experts are numbered from 0 to {num_experts - 1}.")
    counts, name = _counts(run, {domain}), domain_name(domain)
    place = run.trace.start.moe_layers.index(layer)
    best, rows = counts[place].most_common(1)[0]
    if said == best or counts[place][said] == rows:
        total = sum(counts[place].values())
        return (
            f"Expert {said} takes {rows} of the {total} slots of {name} in layer {layer}, "
            f"{100 * rows / total:.0f} %."
        )
    everybody = _counts(run, None)[place].most_common(1)[0][0]
    if said == everybody:
        raise NotYet(f"That one is the busiest over all domains; look at the line of {name}.")
    for index, other in enumerate(run.trace.start.moe_layers):
        if index != place and counts[index].most_common(1)[0][0] == said:
            raise NotYet(f"That is its favourite in layer {other}; layer {layer} is asked for.")
    raise NotYet(f"{counts[place][said]} slots went there; another expert has {rows}.")


def steer(
    answer: Any, small: SmallEngine, layer: int, expert: int, used: Sequence[Labelled]
) -> str:
    """Check that a text of the learner's own sends most of its tokens to one expert."""
    if not isinstance(answer, str):
        raise CannotRun(f"The answer must be a text in quotes; it is {described(answer)}.")
    try:
        run = small.run(answer, max_tokens=0)
    except RequestError as wrong:
        raise CannotRun(f"The engine refused the text: {wrong}") from wrong
    place = run.trace.start.moe_layers.index(layer)
    # The first token is the model's own mark and the same for every text.
    ways = [_ways(run, at)[place] for at in range(1, len(run.tokens))]
    if len(ways) < MIN_TOKENS:
        raise NotYet(
            f"The text has {len(ways)} tokens; write one of at least {MIN_TOKENS}, so that luck "
            "does not decide."
        )
    if any(_taken(answer, text) for _, text in used):
        raise NotYet("That text was part of the run already; write one of your own.")
    share = sum(expert in way for way in ways) / len(ways)
    if share >= WANTED_SHARE:
        return f"Expert {expert} of layer {layer} runs {share:.0%} of the tokens of your text."
    favourite = Counter(e for way in ways for e in way).most_common(1)[0][0]
    raise NotYet(
        f"Expert {expert} runs {share:.0%} of its tokens, {WANTED_SHARE:.0%} are wanted; this text "
        f"prefers expert {favourite}. See on the map who uses expert {expert}."
    )


EXERCISES = (
    Exercise(
        name="read the stepper",
        blank="""
# Two numbers, the expert with the larger weight first, such as (0, 1)
answer = None
""",
        solution="""
answer = tuple(run.decision(position, layer).topk_ids.tolist())
""",
        verify=read_stepper,
    ),
    Exercise(
        name="read the map",
        blank="""
# The number of one expert
answer = None
""",
        solution="""
own = shares[(shares["domain"] == "en") & (shares["layer"] == 3)]
answer = int(own.loc[own["rows"].idxmax(), "expert"])
""",
        verify=read_map,
    ),
    Exercise(
        name="steer with a text",
        blank="""
# A text in quotes, of a dozen words or so
answer = None
""",
        solution="""
answer = "for line in self.lines:\\n    if line is None:\\n        return self.read(line)\\n"
""",
        verify=steer,
    ),
)


def _taken(answer: str, text: str) -> bool:
    """Say whether an answer is a text of the run, or most of one; white space does not count."""
    own, used = " ".join(answer.split()), " ".join(text.split())
    return own == used or (own in used and 2 * len(own) > len(used))


def _ways(run: Run, position: int) -> list[tuple[int, ...]]:
    """Return the experts of one token of the first request, layer by layer, from its row."""
    columns, request = run.trace.columns, run.completions[0].request_id
    for row in range(run.trace.num_rows):
        if columns["rows/request_ids"][row] == request and (
            columns["rows/positions"][row] == position
        ):
            return [tuple(int(e) for e in ids) for ids in columns["rows/topk_ids"][row]]
    raise CannotRun(f"The run has no token {position}.")


def _counts(run: Run, domains: set[str] | None) -> list[Counter[int]]:
    """Count each layer's slots by expert, over the requests of these domains; None takes all."""
    wanted = {
        done.request_id for done in run.completions if domains is None or done.label in domains
    }
    counts: list[Counter[int]] = [Counter() for _ in run.trace.start.moe_layers]
    columns = run.trace.columns
    for request, ids in zip(
        columns["rows/request_ids"].tolist(), columns["rows/topk_ids"].tolist(), strict=True
    ):
        if request in wanted:
            for place, chosen in enumerate(ids):
                counts[place].update(chosen)
    return counts
