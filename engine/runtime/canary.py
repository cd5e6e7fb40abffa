"""The canary: a few fixed rows that prove that a new table computes what the old one did.

Before the ranks take up a table and again after it, every rank runs the same rows, one each. In
every layer they are sent to the experts that the table moves, a few at a time. Logits must be equal
bit for bit in deterministic mode. Otherwise kernels may add up in another order when an expert's
rows are shared out in another way, so they must be equal to within a share of their scale that a
wrong expert passes by far. Called by `engine.runtime.migration` between two steps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from engine.cluster.messages import StepReport
from engine.cluster.rank import CANARY_REQUEST, Work, canary_block
from engine.config import EngineConfig, ModelConfig, SamplingParams
from engine.events import Float32
from engine.model.batch import Draw, Span
from engine.routing.policy import LayerPolicy
from engine.routing.table import RoutingTable

MOST_STEPS = 4
"""Before, and as many after: what is moved beyond the experts these can reach is not looked at."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2, "int8": 2e-2}
"""By the experts' number format: the largest difference allowed, by the largest logit."""


class Asking(Protocol):
    """Whoever runs a step on the ranks, see `engine.runtime.ranked`."""

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that take part."""

    def try_out(self, works: Mapping[int, Work], version: int) -> dict[int, StepReport]:
        """Run rows that belong to no request under the table of `version`."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What the rows gave before."""

    policies: list[tuple[LayerPolicy | None, ...]]
    """Of each step: the experts it forces, by layer."""
    logits: list[Float32]
    """Of each step: (G, V)."""
    num_checked: int
    num_moved: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the canary says of a table."""

    equal: bool
    num_checked: int
    """Of the experts of all layers that the table moves, how many the rows went to."""
    num_moved: int
    max_error: float
    """Largest difference of two logits by the largest logit."""
    allowed: float
    ms: float
    """What it took between two steps."""

    @property
    def reason(self) -> str:
        """In words, for people."""
        return (
            f"by {self.max_error:.2g} of their scale, where {self.allowed:g} is allowed, with "
            f"{self.num_checked} of {self.num_moved} moved experts looked at"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the figures by name."""
        return asdict(self)


class Canary:
    """Runs the rows and compares."""

    def __init__(self, asking: Asking, config: EngineConfig, model: ModelConfig) -> None:
        self._asking, self._config, self._model = asking, config, model
        self._last_right: Trial | None = None
        """While a bad table is in force, kept on purpose: what the last good one computed."""
        self._allowed = 0.0 if config.deterministic else TOLERANCE[config.number_format]

    def before(self, now: RoutingTable, table: RoutingTable) -> Trial:
        """Run the rows for the step from `now` to `table`, under `now`.

        Raises:
            RankLostError: a rank is dead or frozen.
        """
        if self._last_right is not None:
            return replace(self._last_right, seconds=0.0)
        began = time.perf_counter()
        moved = moved_experts(now, table)
        steps = steps_for(moved, self._model.top_k)
        policies = [self._forcing(step) for step in steps]
        logits = [self._run(each, now.version) for each in policies]
        return Trial(
            policies,
            logits,
            num_checked=sum(len(experts) for step in steps for experts in step),
            num_moved=sum(map(len, moved)),
            seconds=time.perf_counter() - began,
        )

    def after(self, trial: Trial, table: RoutingTable) -> Verdict:
        """Run the rows again under `table`, which is in force, and compare.

        Raises:
            RankLostError: a rank is dead or frozen.
        """
        began = time.perf_counter()
        pairs = [
            (old, self._run(policies, table.version))
            for policies, old in zip(trial.policies, trial.logits, strict=True)
        ]
        error = max((difference(old, new) for old, new in pairs), default=0.0)
        return Verdict(
            equal=error <= self._allowed,
            num_checked=trial.num_checked,
            num_moved=trial.num_moved,
            max_error=error,
            allowed=self._allowed,
            ms=round((trial.seconds + time.perf_counter() - began) * 1e3, 3),
        )

    def kept(self, trial: Trial, verdict: Verdict) -> None:
        """Note that a table stays in force; the next is never held against a bad one's logits."""
        self._last_right = None if verdict.equal else trial

    def _run(self, policies: tuple[LayerPolicy | None, ...], version: int) -> Float32:
        block = canary_block(self._config)
        works = {
            rank: Work(
                spans=[self._row(rank, block)],
                fresh_blocks=[block],
                policies=policies,
                record=False,
            )
            for rank in self._asking.members
        }
        reports = self._asking.try_out(works, version)
        found: Float32 = np.concatenate([report.logits_BV for report in reports.values()])
        return found

    def _row(self, rank: int, block: int) -> Span:
        """Return the row of one rank: another token on each, whose logits come back."""
        token = (rank + 1) * 7 % self._model.vocab_size
        draw = Draw(SamplingParams(max_tokens=1, logprobs=0), seed=0, position=1)
        return Span(CANARY_REQUEST, rank, 0, [token], (block,), draw)

    def _forcing(self, experts_L: list[list[int]]) -> tuple[LayerPolicy | None, ...]:
        num_experts = self._model.num_experts
        none_E, zero_E = torch.zeros(num_experts, dtype=torch.bool), torch.zeros(num_experts)

        def layer(experts: list[int]) -> LayerPolicy | None:
            if not experts:
                return None
            forced_E = none_E.clone()
            forced_E[experts] = True
            return LayerPolicy(none_E, forced_E, zero_E)

        return tuple(layer(experts) for experts in experts_L)


def moved_experts(now: RoutingTable, table: RoutingTable) -> list[list[int]]:
    """Return by layer the experts that are not on the ranks they were on.

    From owners ``[0, 0, 1, 1]`` of experts 0 to 3 to ``[0, 1, 1, 1]``: ``[[1]]``.
    """
    was_LEG, is_LEG = _ranks_of(now), _ranks_of(table)
    return [np.flatnonzero(row).tolist() for row in (was_LEG != is_LEG).any(axis=2)]


def steps_for(moved: list[list[int]], top_k: int) -> list[list[list[int]]]:
    """Deal the moved experts into steps of at most `top_k` a layer.

    ``[[1, 4, 5], [2]]`` with 2 at a time: ``[[1, 4], [2]]`` and ``[[5], []]``.
    """
    longest = max(map(len, moved), default=0)
    num_steps = min(MOST_STEPS, -(-longest // top_k)) if top_k else 0
    return [
        [experts[step * top_k : (step + 1) * top_k] for experts in moved]
        for step in range(num_steps)
    ]


def difference(old: Float32, new: Float32) -> float:
    """Return the largest difference by the largest of `old`; 0 for equal bits, NaN included."""
    if np.array_equal(old, new, equal_nan=True):
        return 0.0
    with np.errstate(invalid="ignore"):
        error = float(np.abs(old - new).max()) / max(float(np.abs(old).max()), 1e-30)
    return error if error == error else float("inf")


def _ranks_of(table: RoutingTable) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return (L, E, G) whether a rank holds an expert."""
    there_LEG = np.zeros((table.num_layers, table.num_experts, table.num_devices), dtype=bool)
    layers, slots = np.nonzero(table.phy2log >= 0)
    there_LEG[layers, table.phy2log[layers, slots], table.rank_of_phy[slots]] = True
    return there_LEG
