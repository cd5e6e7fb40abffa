"""What the draft gains and costs at batch 1, by domain: with and without it, in turns.

Prompts are beginnings of held-out documents; each is continued greedily for a fixed number of
tokens by an engine without a draft and by one with it, one right after the other, round by round.
The moment of every token is kept, so that what comes after token 50 stands by itself: by then a
domain on which the draft loses must be switched off and cost next to nothing.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from engine import Completion, Engine, EngineConfig, SamplingParams
from engine.errors import RequestError
from engine.routing.speculation import DEFINITION, Figures
from engine.train.data import DOMAINS, documents
from workbench.bench.machine import report, torch_threads

PROMPT_TOKENS = 32
SETTLED = 50
"""Tokens after which a draft that loses must be silent."""
RATIO = (
    "median over rounds and prompts of the seconds without a draft / with it, after the first token"
    " or the 50th; _cpu: of the processor time of the engine's thread"
)


class Moment(NamedTuple):
    """A moment by the wall clock and by the processor time of the engine's thread."""

    wall_s: float
    busy_s: float


@dataclass(frozen=True, slots=True)
class Timed:
    """One continuation."""

    completion: Completion
    moments: list[Moment]
    """When each token was there."""

    def seconds(self, first: int = 1) -> float:
        """Return the seconds from token `first` on, 1 being all after the first."""
        return self.moments[-1].wall_s - self.moments[first - 1].wall_s

    def busy_s(self, first: int = 1) -> float:
        """Return likewise the seconds of processor time."""
        return self.moments[-1].busy_s - self.moments[first - 1].busy_s


def run(
    model: Path,
    draft: Path,
    *,
    domains: Sequence[str] = DOMAINS,
    prompts: int = 3,
    tokens: int = 128,
    rounds: int = 3,
    draft_tokens: int = 4,
    draft_length: str = "adaptive",
    dtype: str = "float32",
    threads: int | None = None,
) -> dict[str, Any]:
    """Measure one row per domain, and one of a draft that does not fit, on the last domain.

    Args:
        model: folder of the target.
        draft: folder of the draft.
        domains: of `engine.train.data.DOMAINS`.
        prompts: different prompts of each domain.
        tokens: new tokens for each.
        rounds: how often each is run; one round more, before, is thrown away.
        draft_tokens: most proposals in one step.
        draft_length: `adaptive` or `fixed`.
        dtype: of the target; the draft is in fp32.
        threads: of one product; None leaves torch's setting.

    Raises:
        ConfigError: an unknown domain, or an option of the engine that is not allowed.
        RequestError: fewer than 64 tokens, or no rounds.
    """
    if tokens < SETTLED + 14 or rounds < 1 or prompts < 1:
        raise RequestError(
            f"tokens ({tokens}) must be at least {SETTLED + 14}, rounds ({rounds}) and prompts "
            f"({prompts}) at least 1."
        )
    with torch_threads(threads):
        plain = Engine(EngineConfig(model=model, dtype=dtype))
        drafting = Engine(
            EngineConfig(
                model=model,
                dtype=dtype,
                draft=draft,
                draft_tokens=draft_tokens,
                draft_length=draft_length,
            )
        )
        rows = [
            _row(domain, _prompts(plain, domain, prompts), (plain, drafting), tokens, rounds)
            for domain in domains
        ]
        rows.append(_misfit(domains[-1], (plain, drafting), prompts, tokens, rounds))
        learned = drafting.stats().draft or {}
    options = f"--tokens {tokens} --prompts {prompts} --rounds {rounds}"
    command = f"workbench bench speculation {options} --json"
    return report(rows, command) | {
        "draft": draft.name,
        "definition": DEFINITION,
        "ratio_formula": RATIO,
        "learned": {name: learned[name] for name in ("step_ms", "step_of_three_ms", "pass_ms")},
        "notes": [f"acceptance: {DEFINITION}", f"ratio: {RATIO}"],
    }


def _row(
    domain: str,
    prompts: Sequence[list[int]],
    engines: tuple[Engine, Engine],
    tokens: int,
    rounds: int,
) -> dict[str, Any]:
    plain, drafting = engines
    _continue(plain, prompts[0], tokens)
    _continue(drafting, prompts[0], tokens)
    pairs: list[tuple[Timed, Timed]] = []
    for number, prompt in itertools.product(range(rounds), prompts):
        order = (plain, drafting) if number % 2 == 0 else (drafting, plain)
        done = {id(engine): _continue(engine, prompt, tokens) for engine in order}
        pairs.append((done[id(plain)], done[id(drafting)]))
    figures = Figures()
    for _, with_draft in pairs:
        assert with_draft.completion.draft is not None, "the engine has a draft"
        figures.add(with_draft.completion.draft)
    ends = [with_draft.completion.draft_switched for _, with_draft in pairs]
    off = [first[0][0] for first in ends if first and not first[0][1]]
    left = [
        pair
        for pair, ended in zip(pairs, ends, strict=True)
        if ended and not any(on for _, on in ended)
    ]
    plain_s, draft_s = (sum(one[side].seconds() for one in pairs) for side in (0, 1))
    total = (tokens - 1) * len(pairs)
    return {
        "domain": domain,
        "plain_tokens_per_second": round(total / plain_s, 1),
        "draft_tokens_per_second": round(total / draft_s, 1),
        "ratio": _ratio(pairs, 1, Timed.seconds),
        "ratio_after_50": _ratio(pairs, SETTLED, Timed.seconds),
        "ratio_cpu": _ratio(pairs, 1, Timed.busy_s),
        "ratio_cpu_after_50": _ratio(pairs, SETTLED, Timed.busy_s),
        "acceptance": _rounded(figures.acceptance),
        "tokens_per_step": _rounded(figures.tokens_per_step),
        "proposed": figures.proposed,
        "accepted": figures.accepted,
        "steps": figures.steps,
        "switched_off": f"{len(off)} of {len(pairs)}",
        "off_after_tokens": int(statistics.median(off)) if off else None,
        "ratio_after_50_where_off": _ratio(left, SETTLED, Timed.seconds) if left else None,
        "same_text": f"{sum(_same(a, b) for a, b in pairs)} of {len(pairs)}",
    }


def _misfit(
    domain: str, engines: tuple[Engine, Engine], prompts: int, tokens: int, rounds: int
) -> dict[str, Any]:
    """Measure a draft that always loses: it thinks of the neighbours of the tokens it means."""
    plain, drafting = engines
    drafting.control.inject("draft.propose", _shifted, lease_s=3600)
    try:
        row = _row(domain, _prompts(plain, domain, prompts), engines, tokens, rounds)
    finally:
        drafting.control.clear("draft.propose")
    return row | {"domain": f"{domain}, a misfit draft"}


def _shifted(logits_BV: Any) -> Any:
    return logits_BV.roll(1, dims=-1)


def _same(one: Timed, other: Timed) -> bool:
    return one.completion.token_ids == other.completion.token_ids


def _ratio(
    pairs: Sequence[tuple[Timed, Timed]], first: int, seconds: Callable[[Timed, int], float]
) -> float:
    """Return the median of the seconds without a draft over those with it."""
    ratios = [seconds(plain, first) / seconds(with_draft, first) for plain, with_draft in pairs]
    return round(statistics.median(ratios), 3)


def _rounded(figure: float | None) -> float | None:
    return None if figure is None else round(figure, 3)


def _continue(engine: Engine, prompt: list[int], tokens: int) -> Timed:
    """Continue one prompt alone and note when each token was there."""
    engine.add(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True))
    moments: list[Moment] = []
    while True:
        for output in engine.step():
            now = Moment(time.perf_counter(), time.thread_time())
            moments += [now] * len(output.token_ids)
            if output.completion is not None:
                return Timed(output.completion, moments)


def _prompts(engine: Engine, domain: str, count: int) -> list[list[int]]:
    """Return the first `PROMPT_TOKENS` tokens of so many held-out documents."""
    texts = (engine.tokenizer.encode(one.text) for one in documents(domain, "heldout"))
    long_enough = (ids[:PROMPT_TOKENS] for ids in texts if len(ids) >= PROMPT_TOKENS)
    return list(itertools.islice(long_enough, count))
