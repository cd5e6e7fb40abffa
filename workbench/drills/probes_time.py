"""What an operator can measure of time: where a step's goes, who waits for whom, how long.

All from the recorded steps since the last change. Shares and ratios hold on any machine, so checks
prefer them to milliseconds.
"""

from __future__ import annotations

import numpy as np

from engine.events import ROUTING_STAGES, STAGES, UnitEvent
from workbench.drills.readings import ROWS, Readings, TooLittle, Unreadable, enough, probe
from workbench.trace.schema import Array
from workbench.trace.trace import Trace

LEAST_STEPS = 8
"""Steps that a probe of time wants to see."""
LEAST_BEGUN = 3
"""Requests whose beginning a probe of the cache wants to see."""
LEAST_PROMPTED = 3
"""Steps with prompts that a probe of them wants to see."""


@probe("share", "median over steps of (select + place + dispatch) / step")
def routing_share(readings: Readings, rows: int = ROWS) -> float:
    """Return the share of a step spent deciding where tokens go."""
    trace = enough(readings, rows)
    deciding = sum(_stage(trace, stage) for stage in ROUTING_STAGES)
    return float(np.median(deciding / trace.columns["steps/duration_ms"]))


@probe("share", "median over steps of stage / step")
def stage_share(readings: Readings, stage: str, rows: int = ROWS) -> float:
    """Return the share of a step spent in one stage."""
    trace = enough(readings, rows)
    return float(np.median(_stage(trace, stage) / trace.columns["steps/duration_ms"]))


@probe("ratio", "median over steps with prompts of stage / other stage")
def prompt_stage_ratio(readings: Readings, stage: str, other: str, rows: int = ROWS) -> float:
    """Return how much longer one stage takes than another, in steps that run a prompt.

    Of two stages that each end within a millisecond, other work on the machine stretches few, so
    the median is the same beside it; a stage's share of a step, which is stretched every time, is
    not.
    """
    prompted = _prompted(enough(readings, rows))
    return float(np.median(_ratios(readings, stage, other, rows)[prompted]))


@probe("ratio", "mean over steps of stage / other stage")
def stage_ratio(readings: Readings, stage: str, other: str, rows: int = ROWS) -> float:
    """Return how much longer one stage takes than another, in the mean of all steps."""
    return float(_ratios(readings, stage, other, rows).mean())


@probe("ratio", "80th percentile over steps of stage / other stage")
def slow_stage_ratio(readings: Readings, stage: str, other: str, rows: int = ROWS) -> float:
    """Return how much longer one stage takes than another, in the slowest fifth of steps at least.

    What makes two steps in five wait shows here and in no median.
    """
    return float(np.quantile(_ratios(readings, stage, other, rows), 0.8))


@probe("count", "median of rows, over steps without prompts")
def rows_a_step(readings: Readings, rows: int = ROWS) -> float:
    """Return how many rows a step runs that only decodes."""
    trace = enough(readings, rows)
    plain = trace.columns["steps/num_prefill_rows"] == 0
    counts = np.diff(trace.columns["steps/row_start"])[plain]
    if len(counts) < LEAST_STEPS:
        raise TooLittle("too few steps without prompts have run; try again in a moment.")
    return float(np.median(counts))


@probe("share", "prompt tokens found in the cache / prompt tokens of requests that began")
def found_share(readings: Readings, rows: int = ROWS) -> float:
    """Return the share of prompt tokens that the cache held, so that they did not run."""
    _, found, run = _beginnings(readings, rows)
    return found / (found + run)


@probe("count", "rows of prompts / requests that began")
def prompt_rows_a_request(readings: Readings, rows: int = ROWS) -> float:
    """Return how many rows of its prompt a request runs."""
    begun, _, run = _beginnings(readings, rows)
    return run / begun


@probe("count", "median over steps of the requests that wait")
def waiting_requests(readings: Readings, rows: int = ROWS) -> float:
    """Return how many requests wait for a place."""
    return float(np.median(enough(readings, rows).columns["steps/num_waiting"]))


@probe("s", "longest time between two steps that brought tokens, as the gateway saw it")
def longest_pause(readings: Readings, rows: int = ROWS) -> float:
    """Return the longest time in which nobody got a token, since the last change."""
    enough(readings, rows)
    return float(readings.ledger["longest_pause_s"])


@probe("count", "tokens / seconds, since the last change, as the gateway saw it")
def tokens_a_second(readings: Readings, rows: int = ROWS) -> float:
    """Return how many tokens all requests together get in a second."""
    enough(readings, rows)
    return float(readings.ledger["tokens_a_second"])


@probe("ms", "median of the steps' time, over steps without prompts")
def step_ms(readings: Readings, rows: int = ROWS) -> float:
    """Return how long a step takes that only decodes."""
    trace = enough(readings, rows)
    plain = trace.columns["steps/num_prefill_rows"] == 0
    if plain.sum() < LEAST_STEPS:
        raise TooLittle("too few steps without prompts have run; try again in a moment.")
    return float(np.median(trace.columns["steps/duration_ms"][plain]))


@probe("share", "rows that a rank's experts run / rows, the rank with most")
def largest_rank(readings: Readings, rows: int = ROWS) -> float:
    """Return the share of all expert rows that run on the rank with most of them."""
    trace = _ranked(readings, rows)
    rows_G = trace.columns["ranks/rows"].sum(axis=0)
    return float(rows_G.max() / rows_G.sum())


@probe("count", "messages between ranks / steps")
def messages_a_step(readings: Readings, rows: int = ROWS) -> float:
    """Return how many messages a step sends between ranks."""
    trace = _ranked(readings, rows)
    return float(trace.columns["ranks/messages"].sum() / trace.num_steps)


@probe("count", "rows sent to experts / messages between ranks")
def rows_a_message(readings: Readings, rows: int = ROWS) -> float:
    """Return how many rows there are for each message between ranks."""
    columns = _ranked(readings, rows).columns
    return float(columns["ranks/rows"].sum() / max(1, columns["ranks/messages"].sum()))


@probe("share", "busy / (busy + wait + transfer), over ranks and steps")
def utilisation(readings: Readings, rows: int = ROWS) -> float:
    """Return the share of time in which ranks compute and do not wait for others."""
    trace = _ranked(readings, rows)
    busy, wait, transfer = (
        trace.columns[f"ranks/{name}_ms"].sum() for name in ("busy", "wait", "transfer")
    )
    return float(busy / (busy + wait + transfer))


@probe("ratio", "median over steps of max(busy) / median(busy) of the other ranks")
def slowest_rank(readings: Readings, rows: int = ROWS) -> float:
    """Return how much longer the slowest rank computes than the others, whoever it is."""
    trace = _ranked(readings, rows)
    busy_SG = _by_rank(trace, "ranks/busy_ms")
    mean_G = np.median(busy_SG, axis=0)
    slow = int(mean_G.argmax())
    return float(mean_G[slow] / max(float(np.median(np.delete(mean_G, slow))), 1e-3))


@probe("share", "wait of the rank that waits least / wait of the one that waits most")
def shared_wait(readings: Readings, rows: int = ROWS) -> float:
    """Return how evenly the ranks wait; where one is slow all others wait for it."""
    trace = _ranked(readings, rows)
    waits_G = np.median(
        _by_rank(trace, "ranks/wait_ms") + _by_rank(trace, "ranks/transfer_ms"), axis=0
    )
    return float(waits_G.min() / max(float(waits_G.max()), 1e-3))


@probe("share", "changes of number format from row to row / rows, in the experts' order")
def format_switches(readings: Readings, rows: int = ROWS) -> float:
    """Return how often the number format changes from one row of an expert to the next."""
    units = _units(readings, rows)
    return sum(unit.switches for unit in units) / max(1, sum(unit.rows for unit in units))


@probe("share", "rows run again in full precision / rows")
def precision_reruns(readings: Readings, rows: int = ROWS) -> float:
    """Return the share of expert rows that ran again because their format was predicted wrong."""
    units = _units(readings, rows)
    return sum(unit.rerun_rows for unit in units) / max(1, sum(unit.rows for unit in units))


@probe("share", "units that failed their check / units that ran in INT8")
def failed_units(readings: Readings, rows: int = ROWS) -> float:
    """Return the share of INT8 units that were predicted wrong."""
    units = _units(readings, rows)
    voted = sum(unit.int8_units for unit in units)
    return sum(unit.failed_units for unit in units) / max(1, voted)


def _beginnings(readings: Readings, rows: int) -> tuple[int, int, int]:
    """Return requests that began, prompt tokens they found in the cache, rows of prompts run.

    A request's first row of a prompt stands at the position up to which the cache held it. Those of
    the first recorded step may have begun before it and do not count.
    """
    columns = enough(readings, rows).columns
    requests, positions = columns["rows/request_ids"], columns["rows/positions"]
    old = int(columns["steps/row_start"][1])
    _, first = np.unique(requests, return_index=True)
    begun = [
        at
        for at in first[first >= old].tolist()
        # Two rows of a request side by side are of one step, which only a prompt has.
        if at + 1 < len(requests) and requests[at] == requests[at + 1]
    ]
    if len(begun) < LEAST_BEGUN:
        raise Unreadable(
            "too few requests have begun since the last change; try again in a moment."
        )
    run = int(columns["steps/num_prefill_rows"][1:].sum())
    return len(begun), int(positions[begun].sum()), run


def _units(readings: Readings, rows: int) -> list[UnitEvent]:
    """Return what became of the units of every recorded step and layer; [] in one format."""
    enough(readings, rows)
    return [unit for step in readings.units for unit in step]


def _stage(trace: Trace, stage: str) -> Array:
    """Return (S,) milliseconds of one stage; 0 where it was not reported."""
    if stage not in STAGES:
        raise Unreadable(f"there is no stage {stage!r}.")
    return np.nan_to_num(trace.columns["steps/stage_ms"][:, STAGES.index(stage)])


def _ratios(readings: Readings, stage: str, other: str, rows: int) -> Array:
    """Return (S,) the time of one stage by that of another."""
    trace = enough(readings, rows)
    own, by = _stage(trace, stage), _stage(trace, other)
    if not (by > 0).all():
        raise Unreadable(f"the stage {other} was not reported.")
    ratios: Array = own / by
    return ratios


def _prompted(trace: Trace) -> Array:
    """Return (S,) which steps ran a prompt."""
    prompted: Array = trace.columns["steps/num_prefill_rows"] > 0
    if prompted.sum() < LEAST_PROMPTED:
        raise TooLittle("too few steps with prompts have run; try again in a moment.")
    return prompted


def _ranked(readings: Readings, rows: int) -> Trace:
    trace = enough(readings, rows)
    if len(set(trace.columns["ranks/rank"].tolist())) < 2:
        raise Unreadable("fewer than two ranks take part.")
    return trace


def _by_rank(trace: Trace, column: str) -> Array:
    """Return (S, G) a column of ranks, over those steps in which all of them took part."""
    ranks = sorted(set(trace.columns["ranks/rank"].tolist()))
    steps, values = trace.columns["ranks/step_index"], trace.columns[column]
    full = np.flatnonzero(np.bincount(steps, minlength=trace.num_steps) == len(ranks))
    return values[np.isin(steps, full)].reshape(-1, len(ranks))
