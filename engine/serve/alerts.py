"""When somebody should look: rules as data, with a value to raise at and another to clear at.

The same rules are followed here, twice a second, and written for Prometheus by
`engine.serve.deploy`. A value between the two keeps an alert as it is, so that one at the edge does
not flicker.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.serve.health import Health
from engine.serve.tally import ServeTally

log = logging.getLogger("engine.serve")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One reason to look."""

    name: str
    reading: str
    """Which of `readings` it is about."""
    raise_above: float
    clear_below: float
    """At most `raise_above`."""
    for_s: float
    """How long the value must stay there, in either direction."""
    severity: str
    """`warning` or `critical`."""
    summary: str
    expression: str
    """The same reading in Prometheus's language, by instance."""


MEAN_LATENCY = "MeanLatencyHigh"
EXPERT_IDLE = "ExpertWithoutTokens"

RULES = (
    Rule(
        name=MEAN_LATENCY,
        reading="mean_latency_s",
        raise_above=10.0,
        clear_below=8.0,
        for_s=30.0,
        severity="warning",
        summary="requests take too long in the mean",
        expression="sum by (job, instance) (rate(tokenrouter_e2e_request_latency_seconds_sum[1m]))"
        " / sum by (job, instance) (rate(tokenrouter_e2e_request_latency_seconds_count[1m]))",
    ),
    Rule(
        name=EXPERT_IDLE,
        reading="expert_idle_s",
        raise_above=300.0,
        clear_below=60.0,
        for_s=0.0,
        severity="warning",
        summary="an expert has had no token while others had",
        expression="max by (job, instance) (tokenrouter_expert_idle_seconds)",
    ),
    Rule(
        name="RoutingOverheadNoticeable",
        reading="overhead_share",
        raise_above=0.05,
        clear_below=0.04,
        for_s=30.0,
        severity="warning",
        summary="more than 5 % of the steps' time goes into routing",
        expression="sum by (job, instance) (rate(tokenrouter_routing_seconds_total[1m]))"
        " / sum by (job, instance) (rate(tokenrouter_step_seconds_total[1m]))",
    ),
    Rule(
        name="RoutingOverheadHigh",
        reading="overhead_share",
        raise_above=0.10,
        clear_below=0.08,
        for_s=30.0,
        severity="critical",
        summary="more than 10 % of the steps' time goes into routing",
        expression="sum by (job, instance) (rate(tokenrouter_routing_seconds_total[1m]))"
        " / sum by (job, instance) (rate(tokenrouter_step_seconds_total[1m]))",
    ),
    Rule(
        name="RankSlow",
        reading="rank_excess_s",
        raise_above=0.01,
        clear_below=0.005,
        for_s=5.0,
        severity="warning",
        summary="a rank takes longer than the others for the same rows",
        expression="max by (job, instance) (tokenrouter_rank_excess_seconds)",
    ),
    Rule(
        name="RankSilent",
        reading="ranks_silent",
        raise_above=0.0,
        clear_below=0.0,
        for_s=0.0,
        severity="critical",
        summary="a rank is dead or gives no sign of life",
        expression="count by (job, instance) (tokenrouter_rank_up == 0)"
        " or 0 * count by (job, instance) (tokenrouter_rank_up)",
    ),
    Rule(
        name="RankTableStale",
        reading="rank_table_lag",
        raise_above=0.0,
        clear_below=0.0,
        for_s=5.0,
        severity="critical",
        summary="a rank reads an older routing table than the others",
        expression="max by (job, instance) (tokenrouter_rank_table_lag)",
    ),
    Rule(
        name="QueueLong",
        reading="num_waiting",
        raise_above=128.0,
        clear_below=64.0,
        for_s=10.0,
        severity="warning",
        summary="many requests wait for a place",
        expression="max by (job, instance) (tokenrouter_num_requests_waiting)",
    ),
)


def readings(tally: ServeTally, health: Health, num_waiting: int) -> dict[str, float | None]:
    """Return the value of each reading now; None where there is nothing to read."""
    recent = tally.recent()
    idle_LE, slow = tally.idle_LE(), tally.straggler()
    expected, versions = health.expected_ranks, tally.rank_versions
    lags = [tally.table_version - versions[rank] for rank in expected if rank in versions]
    return {
        "mean_latency_s": recent.mean_latency_s,
        "expert_idle_s": float(idle_LE.max()) if idle_LE.size else None,
        "overhead_share": recent.overhead_share,
        "rank_excess_s": slow.excess_ms / 1e3 if slow else 0.0,
        "ranks_silent": float(len(expected - health.living_ranks)),
        "rank_table_lag": float(max(lags, default=0)),
        "num_waiting": float(num_waiting),
    }


class Alerts:
    """Follows the rules over time. One thread calls `check`, any may read `active`."""

    def __init__(
        self, rules: tuple[Rule, ...] = RULES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.rules = rules
        self.active: frozenset[str] = frozenset()
        """Names of the rules that hold."""
        self.values: dict[str, float | None] = {}
        """The readings of the last check."""
        self._clock = clock
        self._since: dict[str, float] = {}
        """Rule -> since when its value has been on the other side."""

    def check(self, values: dict[str, float | None]) -> None:
        """Take new readings; one that is None leaves its rules as they are."""
        now, active = self._clock(), set(self.active)
        self.values = values
        for rule in self.rules:
            value = values[rule.reading]
            if value is None:
                continue
            holds = rule.name in active
            crossed = value <= rule.clear_below if holds else value > rule.raise_above
            if not crossed:
                self._since.pop(rule.name, None)
            elif now - self._since.setdefault(rule.name, now) >= rule.for_s:
                self._since.pop(rule.name)
                active ^= {rule.name}
                self._say(rule, value, raised=not holds)
        self.active = frozenset(active)

    def _say(self, rule: Rule, value: float, *, raised: bool) -> None:
        if raised:
            log.warning("alert %s (%s): %s (%.4g)", rule.name, rule.severity, rule.summary, value)
        else:
            log.info("alert %s is over (%.4g)", rule.name, value)


def with_thresholds(max_latency_s: float, expert_idle_minutes: float) -> tuple[Rule, ...]:
    """Return the rules with an operator's own thresholds."""
    own = {
        MEAN_LATENCY: (max_latency_s, 0.8 * max_latency_s),
        EXPERT_IDLE: (60.0 * expert_idle_minutes, 12.0 * expert_idle_minutes),
    }
    return tuple(
        replace(rule, raise_above=own[rule.name][0], clear_below=own[rule.name][1])
        if rule.name in own
        else rule
        for rule in RULES
    )
