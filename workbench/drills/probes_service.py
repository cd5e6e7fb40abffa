"""What an operator can measure of a service over HTTP: its metrics, its ranks, its answers.

Counters are read as differences from the last change, gauges as they are. Ratios hold on any
machine, so checks prefer them to milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from workbench.drills.readings import ServiceReadings, Unreadable, probe

PREFIX = "tokenrouter_"
LEAST_STEPS = 30
"""Steps that a probe wants to see since the last change."""


@probe("ms", "milliseconds spent deciding at one level / steps")
def service_level_ms(readings: ServiceReadings, level: str = "expert") -> float:
    """Return the milliseconds of a step that one level of routing takes to decide."""
    spent_s = _grown(readings, f'routing_level_seconds_total{{level="{level}"}}')
    return 1e3 * spent_s / _steps(readings)


@probe("share", "time spent deciding / time of all steps")
def service_routing_share(readings: ServiceReadings) -> float:
    """Return the share of the steps' time that is spent deciding."""
    _steps(readings)
    spent_s = _grown(readings, "routing_seconds_total")
    return spent_s / max(1e-9, _grown(readings, "step_seconds_total"))


@probe("ms", "time of all steps / steps")
def service_step_ms(readings: ServiceReadings) -> float:
    """Return how long a step takes."""
    steps = _steps(readings)
    return 1e3 * _grown(readings, "step_seconds_total") / steps


@probe("ms", "what the slowest rank takes in a step beyond the others; 0 if none is slow")
def service_rank_excess_ms(readings: ServiceReadings) -> float:
    """Return how much longer than the others the slowest rank takes in a step."""
    _steps(readings)
    found = labelled(readings.now, "rank_excess_seconds", "rank")
    return 1e3 * max(found.values(), default=0.0)


@probe("count", "ranks that took part before and do not now")
def service_missing_ranks(readings: ServiceReadings) -> float:
    """Return how many ranks are missing."""
    return float(len(set(readings.ranks) - set(readings.status["ranks"]["living"])))


@probe("share", "known questions answered as before / questions", live=False)
def service_answers_kept(readings: ServiceReadings) -> float:
    """Return the share of known questions that are answered as before the drill."""
    if not readings.known:
        raise Unreadable("no answers were written down before the drill.")
    return float((np.asarray(readings.ask()) == np.asarray(readings.known)).mean())


@probe("count", "requests that failed in the engine since the last change")
def service_failed_requests(readings: ServiceReadings) -> float:
    """Return how many requests failed."""
    return _grown(readings, 'requests_ended_total{outcome="failed"}')


@probe("count", "rows whose router logits were not finite since the last change")
def service_bad_rows(readings: ServiceReadings) -> float:
    """Return how many rows had logits that are not finite."""
    return _grown(readings, "bad_rows_total")


def labelled(metrics: Mapping[str, float], name: str, label: str) -> dict[str, float]:
    """Return a family's values by the value of its label."""
    head = f'{PREFIX}{name}{{{label}="'
    return {
        sample.removeprefix(head).removesuffix('"}'): value
        for sample, value in metrics.items()
        if sample.startswith(head)
    }


def _grown(readings: ServiceReadings, sample: str) -> float:
    """Return how much a counter has grown since the last change."""
    name = PREFIX + sample
    if name not in readings.now:
        raise Unreadable(f"the service does not report {name}.")
    grown = readings.now[name] - readings.before.get(name, 0.0)
    if grown < 0:
        raise Unreadable("the service was started again meanwhile; its counters began anew.")
    return grown


def _steps(readings: ServiceReadings) -> float:
    steps = _grown(readings, "engine_steps_total")
    if steps < LEAST_STEPS:
        raise Unreadable(
            f"only {steps:g} of the {LEAST_STEPS} steps it takes have run since the last change; "
            "try again in a moment."
        )
    return steps
