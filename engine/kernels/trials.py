"""Measure, once a process and size, which way of multiplying is fastest for how many rows.

A trial takes a tenth of a second or two. It is never made in deterministic mode, and where nothing
may be measured, or the machine is too busy to tell, a fixed rule stands instead. Another way than
the rule's must win clearly, so that noise does not change what a machine runs from one start to the
next. Called by `cpu_experts`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import cycle

import torch
from torch import Tensor

from engine.kernels import ways
from engine.kernels.dense import Product, by_columns
from engine.kernels.ways import Plan, Way

Times = dict[str, list[float]]
"""For each way its seconds with each of `ROWS`."""
ROWS = (1, 2, 4, 8, 16, 64)
"""Numbers of rows that are tried; each stands for those up to the next."""
BUDGET_S = 0.2
"""A trial that has not seen each way and number of rows three times by then tells nothing."""
ROUNDS, LEAST, BURST_S = 5, 3, 1e-4
"""The first round is thrown away: oneDNN compiles in it."""
STEADY = 1.25
"""Where the two best times of a way differ by more, something else ran meanwhile."""
LARGEST = 1 << 20
"""Values of a matrix that is tried; of larger ones a part of the output channels."""
COPIES, COPIED_BYTES = 6, 16 << 20
"""Matrices that take turns, as experts do: at most so many of so many bytes together, so that they
do not all wait in the nearest cache."""
CLEARLY = 0.1
"""A way other than the fixed rule's must be faster by this share, on the average of all rows."""


def plan(kind: str, out: int, inner: int) -> Plan:
    """Return the fastest way for each number of rows by a matrix (out, inner).

    Args:
        kind: `float32`, `bfloat16` or `int8`, the format of the weights.
        out: O, output channels.
        inner: I.
    """
    return _plan(kind, out, inner, torch.get_num_threads())


@cache
def _plan(kind: str, out: int, inner: int, threads: int) -> Plan:
    found = ways.candidates(kind, out * inner)
    rule = ways.fixed(kind, out * inner)
    if len(found) < 2 or not out * inner:
        return rule
    began = time.perf_counter()
    with torch.inference_mode():
        rounds = _measure(kind, found, min(out, max(16, LARGEST // inner)), inner, began)
    if not steady(rounds):
        return rule._replace(reason="a fixed rule, for this machine was too busy to measure")
    seconds = {
        way.name: [min(cell) for cell in zip(*(times[way.name] for times in rounds), strict=True)]
        for way in found
    }
    return best(seconds, rule, threads)


def steady(rounds: Sequence[Times]) -> bool:
    """Whether there are enough rounds, and the two best of most cells agree."""
    if len(rounds) < LEAST:
        return False
    cells = [
        sorted(cell)[:2]
        for name in rounds[0]
        for cell in zip(*(times[name] for times in rounds), strict=True)
    ]
    agree = sum(1 for first, second in cells if second <= STEADY * first)
    return 4 * agree >= 3 * len(cells)


def best(seconds: Times, rule: Plan, threads: int) -> Plan:
    """Return the plan with the least time on the average, in logarithms, of all numbers of rows.

    Args:
        seconds: for each way its time with each of `ROWS`.
        rule: taken unless another is faster by `CLEARLY`.
        threads: for the reason.
    """
    logs = {name: [math.log(t) for t in times] for name, times in seconds.items()}

    def cost(plan: Plan) -> float:
        return sum(
            logs[plan.few if plan.few and rows < plan.limit else plan.main][index]
            for index, rows in enumerate(ROWS)
        ) / len(ROWS)

    plans = [Plan(main) for main in seconds]
    plans += [
        Plan(main, few, limit)
        for main in seconds
        for few in seconds
        for limit in ROWS[1:]
        if few != main
    ]
    fastest = min(plans, key=cost)
    gain = math.exp(cost(rule) - cost(fastest))
    with_threads = f"with {threads} thread{'s' if threads > 1 else ''}"
    if gain < 1 + CLEARLY:
        return rule._replace(reason=f"measured {with_threads}: nothing is clearly faster")
    return fastest._replace(
        reason=f"measured {with_threads}: {gain:.2f} x as fast as the fixed rule ({words(rule)})"
    )


def words(plan: Plan) -> str:
    """Return a plan in words: ``half below 4 rows, packed from there on``."""
    if plan.few is None:
        return plan.main
    return f"{plan.few} below {plan.limit} rows, {plan.main} from there on"


def _measure(kind: str, found: list[Way], out: int, inner: int, began: float) -> list[Times]:
    """Return each round's seconds of each way with each of `ROWS`; all take turns."""
    until = began + BUDGET_S / 4
    products = {way.name: cycle(_products(kind, way, out, inner, until)) for way in found}
    rows = [torch.ones(number, inner, dtype=getattr(torch, kind)) for number in ROWS]
    rounds: list[Times] = []
    for _ in range(ROUNDS):
        times: Times = {name: [] for name in products}
        for x in rows:
            for name, turns in products.items():
                times[name].append(_burst(turns, x))
            if time.perf_counter() - began > BUDGET_S:
                return rounds[1:]
        rounds.append(times)
    return rounds[1:]


def _products(kind: str, way: Way, out: int, inner: int, until: float) -> list[Product]:
    """Make several matrices ready for one way; two at least, even if that takes too long."""
    matrix_OI = torch.ones(out, inner, dtype=getattr(torch, kind))
    scales_O = torch.ones(out) if kind == "int8" else None
    copies = min(COPIES, COPIED_BYTES // (matrix_OI.numel() * matrix_OI.itemsize))
    lay_out = by_columns if kind == "float32" and way.name == "columns" else torch.clone
    products: list[Product] = []
    while len(products) < 2 or (len(products) < copies and time.perf_counter() < until):
        products.append(way.make(lay_out(matrix_OI), scales_O).product)
    return products


def _burst(turns: Iterator[Product], x: Tensor) -> float:
    """Return the seconds of a call, over as many as take `BURST_S`."""
    began, calls, taken = time.perf_counter(), 0, 0.0
    while taken < BURST_S:
        next(turns)(x)
        calls += 1
        taken = time.perf_counter() - began
    return taken / calls
