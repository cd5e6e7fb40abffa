"""The ladder, measured: the bundled model on real ranks, the same prompts on every rung.

One engine climbs all rungs: exchange, table and smoothing are switched on it while it lives, so no
two rows differ in anything else. Rungs take turns, in another order each round, and throughput is
the median over rounds of request-level's seconds by the rung's, both of the same round.

A step's communication is what the ranks spend in the stages dispatch, wait, transfer and combine:
sorting rows, sending them, waiting for them and for slower ranks, adding up results. Utilisation is
the rest. On a machine with fewer cores than ranks a rank also waits for a core, and overlap has
nothing to overlap with; the model (`modelled`) has neither limit.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine import Engine, EngineConfig, SamplingParams
from engine.errors import ConfigError, MachineError
from engine.events import ControlEvent, Event, StartEvent, StepEvent
from engine.routing.balance import replicated
from engine.routing.placement import contiguous
from engine.routing.table import RoutingTable
from workbench import paths
from workbench.bench.ladder.rungs import CONTROL, RUNGS, Float, Int, Rung, StepFigures, layer_rows
from workbench.bench.ladder.rungs import row as row_of
from workbench.traffic import corpus_prompts

MOVING = ("dispatch", "wait", "transfer", "combine")
"""Stages of a step that are communication."""
SMOOTHING = 0.5
"""Bonus of the last rung, in units of a logit."""
DENSE = "polyglot-draft"
STAGING_S = 60.0
"""Longest wait for the ranks to take up a table."""


@dataclass(frozen=True, slots=True)
class Climb:
    """One rung in one round."""

    seconds: float
    steps: list[StepFigures]
    num_rows: list[int]
    """Of each step."""
    token_ids: list[tuple[int, ...]]
    """What each request gained."""


def run(
    model: Path,
    *,
    ranks: int = 4,
    requests: int = 32,
    tokens: int = 16,
    rounds: int = 5,
    deterministic: bool = False,
) -> dict[str, Any]:
    """Measure every rung and the dense control.

    Args:
        model: folder of a Mixture-of-Experts model.
        ranks: processes.
        requests: prompts that run together.
        tokens: new tokens of each.
        rounds: how often each rung is run; one round before, which measures the experts' load, is
            thrown away.
        deterministic: equal bits on every rung, at about four times the computing.

    Raises:
        ConfigError: a number is too small, or the model has no experts.
    """
    if ranks < 2:
        raise ConfigError(f"ranks ({ranks}) must be at least 2, or there is nothing to exchange.")
    if min(requests, tokens, rounds) < 1:
        raise ConfigError("requests, tokens and rounds must be whole numbers of at least 1.")
    texts = [prompt.text for prompt in corpus_prompts()]
    prompts = [texts[number % len(texts)] for number in range(requests)]

    def stand(folder: Path) -> Stand:
        return Stand(folder, ranks, prompts, tokens, deterministic=deterministic)

    with closing(stand(model)) as routed:
        config = routed.engine.model_config
        if not config.is_moe:
            raise ConfigError(f"model {model} has no experts; the ladder needs a routed model.")
        climbs = routed.climb(RUNGS, rounds)
        rows = [_row(rung, climbs[rung.name], climbs[RUNGS[0].name]) for rung in RUNGS]
    with closing(stand(paths.model_folder(DENSE))) as dense:
        climbs_dense = dense.climb((RUNGS[0], CONTROL), rounds)
    rows.append(_row(CONTROL, climbs_dense[CONTROL.name], climbs_dense[RUNGS[0].name]))
    per_step = [n for climb in climbs[RUNGS[2].name] for n in climb.num_rows]
    return {
        "topology": f"{ranks} processes of this machine",
        "shape": {
            "model": model.name,
            "experts": config.num_experts,
            "top_k": config.top_k,
            "hidden": config.hidden_size,
            "expert_width": config.moe_intermediate_size,
            "moe_layers": len(config.moe_layers),
            "bytes_per_value": 4,
        },
        "tokens": round(statistics.median(per_step)),
        "rows": rows,
    }


class Meter:
    """A sink that keeps the figures of every step and the load of every expert."""

    enabled = True

    def __init__(self) -> None:
        self.load_LE: Int = np.zeros((0, 0), np.int64)
        """Rows of each expert so far."""
        self._rank_of_phy: Int = np.zeros(0, np.int64)
        self._steps: list[StepFigures] = []
        self._num_rows: list[int] = []

    def emit(self, event: Event) -> None:
        """Take the figures of a step; a start or a new table says where experts live."""
        if isinstance(event, StepEvent):
            self._steps.append(figures(event, self._rank_of_phy))
            self._num_rows.append(event.num_rows)
            for layer, load_E in enumerate(self.load_LE):
                load_E += np.bincount(event.topk_ids[:, layer].ravel(), minlength=len(load_E))
        elif isinstance(event, StartEvent):
            self._rank_of_phy = np.array(event.rank_of_phy)
            self.load_LE = np.zeros((len(event.moe_layers), event.num_experts), np.int64)
        elif isinstance(event, ControlEvent) and event.action == "publish_table":
            self._rank_of_phy = np.array(event.detail["rank_of_phy"])

    def take(self) -> tuple[list[StepFigures], list[int]]:
        """Return figures and rows of each step since the last call."""
        taken = self._steps, self._num_rows
        self._steps, self._num_rows = [], []
        return taken


def figures(event: StepEvent, rank_of_phy: Int) -> StepFigures:
    """Return what a step on ranks took, from what each rank said of it."""
    spent = [rank.stage_ms for rank in event.ranks]
    moving_G: Float = np.array([sum(stages.get(name, 0.0) for name in MOVING) for stages in spent])
    whole_G: Float = np.array([sum(stages.values()) for stages in spent])
    homes_T = event.homes.astype(np.int64)
    ranks_TLK = rank_of_phy[event.phy_ids] if event.phy_ids.size else event.phy_ids
    rows_LG = layer_rows(ranks_TLK.astype(np.int64), homes_T, len(spent))
    return StepFigures(
        step_ms=event.duration_ms,
        comm_ms=float(moving_G.mean()),
        messages=int(sum(rank.messages.sum() for rank in event.ranks)),
        num_bytes=int(sum(rank.num_bytes.sum() for rank in event.ranks)),
        compute_ms_G=whole_G - moving_G,
        busiest_rows=float(rows_LG.max(axis=1).sum()),
        mean_rows=float(rows_LG.mean(axis=1).sum()),
    )


class Stand:
    """One engine on ranks, and the prompts that every rung runs."""

    def __init__(
        self, model: Path, ranks: int, prompts: Sequence[str], tokens: int, *, deterministic: bool
    ) -> None:
        self.meter = Meter()
        config = EngineConfig(
            model=model,
            num_ranks=ranks,
            small_batch_rows=0,  # or small steps would change their mode by themselves
            max_running=max(64, len(prompts)),
            num_blocks=1024,
            deterministic=deterministic,
        )
        self.engine = Engine(config, sink=self.meter)
        self._prompts = list(prompts)
        self._params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        self._has_replicas = False

    def climb(self, rungs: Sequence[Rung], rounds: int) -> dict[str, list[Climb]]:
        """Run each rung once a round, in turns; returns by name a climb for each round."""
        for rung in rungs[:2]:
            self._run(rung)  # warms up, and shows which experts are busy
        climbs: dict[str, list[Climb]] = {rung.name: [] for rung in rungs}
        for number in range(rounds):
            first = number % len(rungs)
            for rung in (*rungs[first:], *rungs[:first]):
                climbs[rung.name].append(self._run(rung))
        return climbs

    def close(self) -> None:
        """End the engine and its ranks."""
        self.engine.close()

    def _run(self, rung: Rung) -> Climb:
        control = self.engine.control
        control.set_exchange(rung.mode)
        control.set_smoothing(SMOOTHING if rung.smoothing else 0.0)
        if rung.replicas != self._has_replicas:
            self._publish(rung.replicas)
        self.meter.take()
        began = time.perf_counter()
        completions = self.engine.generate(self._prompts, self._params)
        seconds = time.perf_counter() - began
        steps, num_rows = self.meter.take()
        return Climb(seconds, steps, num_rows, [done.token_ids for done in completions])

    def _publish(self, replicas: bool) -> None:
        """Give the hottest experts a copy, or take the copies away; returns when that holds."""
        table = self._next_table(replicas)
        self.engine.control.publish_table(table)
        deadline = time.monotonic() + STAGING_S
        while self.engine.table.version != table.version:
            if time.monotonic() > deadline:
                raise MachineError(f"the ranks took up no new table within {STAGING_S:g} s.")
            self.engine.step()
            time.sleep(0.01)
        self._has_replicas = replicas

    def _next_table(self, replicas: bool) -> RoutingTable:
        now = self.engine.table
        version = now.version + 1
        if replicas:
            return replicated(self.meter.load_LE, now.num_devices, version=version)
        return contiguous(now.num_layers, now.num_experts, now.num_devices, version=version)


def _row(rung: Rung, climbs: list[Climb], base: list[Climb]) -> dict[str, Any]:
    paired = list(zip(climbs, base, strict=True))
    return row_of(
        rung.name,
        [step for climb in climbs for step in climb.steps],
        throughput=statistics.median(theirs.seconds / ours.seconds for ours, theirs in paired),
        same_output=all(ours.token_ids == theirs.token_ids for ours, theirs in paired),
        label="measured",
    )
