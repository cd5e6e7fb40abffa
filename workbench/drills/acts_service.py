"""What a learner can do to a service that others use: an operator's acts, over HTTP.

They are called as those of an engine of the drill's own; a layer goes by the model's number. When
the drill ends the service puts back what they have changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.errors import RequestError
from workbench.drills.probes_service import labelled
from workbench.drills.service import Service

RANKS_S = 60.0
"""Longest wait for a rank to come or go."""
LOOK_S = 0.2

ACTS: dict[str, Callable[..., str]] = {}
"""By name, as the command line and drill files call them."""

_OF_RANKS = ("exchange", "drain", "add-rank", "replace-slowest")
"""Acts that a service in one process refuses."""
_OF_JOBS = ("stop-job",)


@dataclass(frozen=True, slots=True)
class ServiceHands:
    """What an act works with."""

    service: Service
    jobs: dict[str, bool]
    """The jobs said to run beside it, and whether they do."""
    end_job: Callable[[str], None]


def offered(*, ranks: bool, jobs: bool) -> list[str]:
    """Return the acts that make sense on a service with or without ranks and jobs beside it."""
    left_out = (*(() if ranks else _OF_RANKS), *(() if jobs else _OF_JOBS))
    return [name for name in ACTS if name not in left_out]


def act(function: Callable[..., str]) -> Callable[..., str]:
    """Declare a function as an act, called by its name with hyphens."""
    ACTS[function.__name__.replace("_", "-")] = function
    return function


@act
def smooth(hands: ServiceHands, bonus: float) -> str:
    """Give the experts of a sequence's previous token a bonus; 0 switches it off."""
    hands.service.order("set_smoothing", bonus=float(bonus))
    return f"smoothing adds {bonus:g} to the experts of the previous token"


@act
def bias(hands: ServiceHands, expert: int, value: float, layer: int | None = None) -> str:
    """Add a value to an expert's logit, in one layer or in all."""
    hands.service.order("set_bias", expert=expert, value=float(value), layer=layer)
    return f"expert {expert} gets {value:+g} in {_where(layer)}"


@act
def ban(hands: ServiceHands, expert: int, layer: int | None = None) -> str:
    """Never choose an expert, in one layer or in all."""
    hands.service.order("ban_expert", expert=expert, layer=layer)
    return f"expert {expert} is banned in {_where(layer)}"


@act
def force(hands: ServiceHands, experts: Sequence[int], layer: int | None = None) -> str:
    """Always choose these experts, in one layer or in all."""
    hands.service.order("force_experts", experts=list(experts), layer=layer)
    return f"experts {', '.join(map(str, experts))} are forced in {_where(layer)}"


@act
def clear_policy(hands: ServiceHands) -> str:
    """Forget all bans, forced experts and biases, and switch smoothing off."""
    hands.service.order("clear_policy")
    return "bans, forced experts, biases and smoothing are gone"


@act
def capacity(hands: ServiceHands, factor: float) -> str:
    """Limit the rows of each expert to a multiple of its even share; 0 drops nothing."""
    hands.service.order("set_capacity", factor=float(factor) or None)
    return f"the capacity factor is {factor:g}" if factor else "nothing is dropped"


@act
def rebalance(hands: ServiceHands) -> str:
    """Publish a table that spreads the load measured so far, if it does so better."""
    before = hands.service.state()["table_version"]
    hands.service.order("rebalance")
    now = hands.service.state()["table_version"]
    return f"the table has version {now}" if now != before else "no table would spread it better"


@act
def exchange(hands: ServiceHands, mode: str) -> str:
    """Exchange rows between ranks by another mode from the next step on."""
    hands.service.order("set_exchange", mode=mode)
    return f"ranks exchange rows by the mode {mode}"


@act
def drain(hands: ServiceHands, rank: int) -> str:
    """Move everything off a rank and end its process."""
    hands.service.order("drain_rank", rank=rank)
    _wait(hands.service, rank, there=False)
    return f"rank {rank} is drained and its process has ended"


@act
def add_rank(hands: ServiceHands, rank: int) -> str:
    """Start a rank that is missing, and let it take part again."""
    hands.service.order("add_rank", rank=rank)
    _wait(hands.service, rank, there=True)
    return f"rank {rank} takes part"


@act
def replace_slowest(hands: ServiceHands) -> str:
    """Drain the rank that the others wait for, and start it again in a fresh process."""
    found = labelled(hands.service.metrics(), "rank_excess_seconds", "rank")
    rank, excess_s = max(found.items(), key=lambda item: item[1], default=("", 0.0))
    if not excess_s:
        raise RequestError("no rank takes longer than the others; nothing is replaced.")
    drain(hands, int(rank))
    add_rank(hands, int(rank))
    return (
        f"rank {rank} took {excess_s * 1e3:.0f} ms beyond the others; a fresh process has its place"
    )


@act
def stop_job(hands: ServiceHands, name: str) -> str:
    """End a job that runs beside the service."""
    if name not in hands.jobs:
        known = ", ".join(hands.jobs) or "there is none"
        raise RequestError(f"no job {name!r} runs beside this service; jobs: {known}.")
    hands.end_job(name)
    return f"the job {name} has ended"


def _wait(service: Service, rank: int, *, there: bool) -> None:
    """Wait until a rank takes part, or does not.

    Raises:
        RequestError: that took too long.
    """
    until = time.monotonic() + RANKS_S
    while (rank in service.status()["ranks"]["living"]) != there:
        if time.monotonic() > until:
            word = "did not come" if there else "is still there"
            raise RequestError(f"rank {rank} {word} after {RANKS_S:g} s.")
        time.sleep(LOOK_S)


def _where(layer: int | None) -> str:
    return "every layer" if layer is None else f"layer {layer}"
