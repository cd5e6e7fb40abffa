"""Generated arithmetic: forty small problems with their answers per document (ours).

A problem is drawn only if its own split is its document's, so no held-out line is ever trained on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from engine.train.data import split_of

PROBLEMS_PER_PIECE = 40


def problems(num_bytes: int, seed: int = 7) -> Iterator[tuple[str, str]]:
    """Yield (key, text) until about `num_bytes` of text have been made."""
    numbers = random.Random(seed)
    made = index = 0
    while made < num_bytes:
        key = f"arithmetic/{index:06d}"
        text = "\n".join(_draw(numbers, split_of(key)) for _ in range(PROBLEMS_PER_PIECE))
        yield key, text
        made += len(text)
        index += 1


def _draw(numbers: random.Random, split: str) -> str:
    make = numbers.choice(KINDS)
    while True:
        problem = make(numbers.randrange)
        if split_of(problem) == split:
            return problem


Draw = Callable[..., int]


def _add(draw: Draw) -> str:
    a, b = draw(1000), draw(1000)
    return f"{a} + {b} = {a + b}"


def _subtract(draw: Draw) -> str:
    b, difference = draw(1000), draw(1000)
    return f"{b + difference} - {b} = {difference}"


def _multiply(draw: Draw) -> str:
    a, b = draw(1, 31), draw(1, 31)
    return f"{a} * {b} = {a * b}"


def _divide(draw: Draw) -> str:
    b, quotient = draw(1, 25), draw(1, 40)
    return f"{b * quotient} / {b} = {quotient}"


def _continue_series(draw: Draw) -> str:
    start, gap = draw(100), draw(1, 13)
    return ", ".join(str(start + gap * i) for i in range(8))


def _square(draw: Draw) -> str:
    a = draw(1, 60)
    return f"{a}^2 = {a * a}"


def _solve(draw: Draw) -> str:
    a, x, b = draw(2, 10), draw(13), draw(30)
    return f"{a}x + {b} = {a * x + b} ; x = {x}"


def _sort(draw: Draw) -> str:
    values = [draw(100) for _ in range(5)]
    return f"sort {values} = {sorted(values)}"


def _compare(draw: Draw) -> str:
    a, b = draw(1, 100), draw(1, 100)
    sign = "<" if a < b else ">" if a > b else "="
    return f"{a} {sign} {b}"


KINDS = (
    _add,
    _subtract,
    _multiply,
    _divide,
    _continue_series,
    _square,
    _solve,
    _sort,
    _compare,
)
