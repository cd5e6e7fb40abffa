"""Ranks that die while requests run, again and again: is any request lost, how long does it take.

One engine in deterministic mode, so that equal logit hashes prove that a struck run computed what
an undisturbed one does. In each round all requests run together, half-way one rank is killed
(SIGKILL) or frozen (SIGSTOP), somewhere within a step; the survivors finish, and the rank joins
again for the next round. Ranks take turns.

A round's `recovery_s` runs from the signal to the end of the first step that counts afterwards:
noticing, a group of the survivors, their new experts, and running the lost sequences again.
`noticed_s` is the first part of it. A killed rank shows at once, a frozen one only when its heart
has not beaten for `heartbeat_timeout_s`.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine import Completion, Engine, EngineConfig, SamplingParams
from engine.config import one_of
from engine.errors import ConfigError, MachineError
from engine.events import ControlEvent, Event
from workbench.traffic import corpus_prompts

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
AIM_S = 2.0
"""Most seconds of a recovery, beyond the heartbeat's bound when a rank is frozen."""
HEARTBEAT_S = 2.0
WITHIN_S = 0.02
"""The signal comes at random up to so long after half of the run, so that it hits any part of a
step."""
REJOIN_S = 120.0
"""Longest wait for a rank to come back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Strike:
    """What one lost rank cost."""

    rank: int
    noticed_s: float
    regroup_s: float
    """Of the recovery: until the survivors were one group and held all experts."""
    recovery_s: float
    rows_again: int
    same_output: bool
    """Whether every request has the tokens and logit hash of the undisturbed run."""


class Losses:
    """A sink that keeps when ranks were lost."""

    enabled = True

    def __init__(self) -> None:
        self.recoveries: list[ControlEvent] = []

    def emit(self, event: Event) -> None:
        """Keep the end of a recovery."""
        if isinstance(event, ControlEvent) and event.action == "recover":
            self.recoveries.append(event)


def run(
    model: Path,
    *,
    ranks: int = 4,
    times: int = 20,
    requests: int = 8,
    tokens: int = 16,
    how: str = "kill",
) -> dict[str, Any]:
    """Strike a rank `times` times in a row.

    Args:
        model: folder of a model.
        ranks: processes.
        times: rounds.
        requests: prompts that run together.
        tokens: new tokens of each.
        how: `kill` or `stop`.

    Raises:
        ConfigError: a number is too small, or `how` is something else.
        MachineError: a rank did not come back.
    """
    one_of("how", how, SIGNALS)
    if ranks < 2:
        raise ConfigError(f"ranks ({ranks}) must be at least 2, or nobody is left to go on.")
    if min(times, requests) < 1 or tokens < 4:
        raise ConfigError("times and requests must be at least 1, tokens at least 4.")
    texts = [prompt.text for prompt in corpus_prompts()]
    prompts = [texts[number % len(texts)] for number in range(requests)]
    config = EngineConfig(
        model=model,
        num_ranks=ranks,
        deterministic=True,
        hash_logits=True,
        heartbeat_timeout_s=HEARTBEAT_S,
        num_blocks=1024,
    )
    losses = Losses()
    with closing(Engine(config, sink=losses)) as engine:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        undisturbed = engine.generate(prompts, params)
        strikes = []
        for turn in range(times):
            rank = turn % ranks
            strikes.append(strike(engine, losses, rank, SIGNALS[how], prompts, params, undisturbed))
            rejoin(engine, rank)
    return report(strikes, ranks, requests, how)


def strike(
    engine: Engine,
    losses: Losses,
    rank: int,
    how: signal.Signals,
    prompts: Sequence[str],
    params: SamplingParams,
    undisturbed: Sequence[Completion],
) -> Strike:
    """Run the prompts, send `how` to `rank` half-way, and compare what came with `undisturbed`.

    Args:
        engine: on ranks, deterministic, idle, its completions hashed.
        losses: listens to the engine.
        rank: takes part.
        how: SIGKILL or SIGSTOP.
        prompts: run together.
        params: of every prompt; `max_tokens` is the length of the run.
        undisturbed: what the same prompts gave in peace.
    """
    assert params.max_tokens is not None, "the run needs a length"
    before, pid = len(losses.recoveries), engine.ranks[rank]
    struck_at: list[float] = []

    def hit() -> None:
        struck_at.append(time.time())
        os.kill(pid, how)

    timer = threading.Timer(random.Random(before).uniform(0, WITHIN_S), hit)
    request_ids = [engine.add(prompt, params) for prompt in prompts]
    done: dict[int, Completion] = {}
    steps, recovered_at = 0, 0.0
    while len(done) < len(prompts):
        steps += 1
        if steps == params.max_tokens // 2:
            timer.start()
        outputs = engine.step()
        done |= {o.request_id: o.completion for o in outputs if o.completion}
        if not recovered_at and outputs and len(losses.recoveries) > before:
            recovered_at = time.time()
    timer.join()
    if len(losses.recoveries) == before:
        raise MachineError(f"rank {rank} was struck, but the run ended before anyone noticed.")
    lost = losses.recoveries[before]
    regroup_s = float(lost.detail["seconds"])
    mine = [done[request_id] for request_id in request_ids]
    return Strike(
        rank=rank,
        noticed_s=round(max(0.0, lost.time_s - regroup_s - struck_at[0]), 3),
        regroup_s=round(regroup_s, 3),
        recovery_s=round(recovered_at - struck_at[0], 3),
        rows_again=sum(one.extra_rows.get("recovery", 0) for one in mine),
        same_output=[_output(one) for one in mine] == [_output(one) for one in undisturbed],
    )


def rejoin(engine: Engine, rank: int) -> None:
    """Start a rank that was lost and step until it holds experts again.

    Raises:
        MachineError: it did not come back in time.
    """
    engine.control.add_rank(rank)
    deadline = time.monotonic() + REJOIN_S
    while rank not in engine.ranks or rank not in engine.table.rank_of_phy:
        if time.monotonic() > deadline:
            raise MachineError(f"rank {rank} did not come back within {REJOIN_S:g} s.")
        engine.step()
        time.sleep(0.005)


def report(strikes: Sequence[Strike], ranks: int, requests: int, how: str) -> dict[str, Any]:
    """Sum up what the strikes cost, and say whether the aim was met."""
    bound_s = AIM_S + (HEARTBEAT_S if how == "stop" else 0.0)
    times = [one.recovery_s for one in strikes]
    return {
        "ranks": ranks,
        "requests": requests,
        "how": how,
        "rows": [asdict(one) for one in strikes],
        "same_output": all(one.same_output for one in strikes),
        "recovery_s": {"median": round(statistics.median(times), 3), "worst": max(times)},
        "bound_s": bound_s,
        "within_bound": max(times) <= bound_s,
        "label": "measured",
    }


def _output(one: Completion) -> tuple[tuple[int, ...], str | None]:
    return one.token_ids, one.logits_sha256
