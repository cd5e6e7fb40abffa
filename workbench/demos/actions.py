"""What a demo's step may do to the engine: only what an operator could do.

Each action takes the engine's control and the traffic, and returns one sentence about what it did.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.runtime.control import Control
from workbench.theme import domain_name
from workbench.traffic import ALL, Traffic


@dataclass(frozen=True, slots=True)
class Hands:
    """What an action works with."""

    control: Control
    traffic: Traffic
    running: int
    """Requests kept running unless a step says otherwise."""


def traffic(hands: Hands, domain: str = ALL, running: int | None = None) -> str:
    """Send texts of one domain, or of all, so many at a time."""
    hands.traffic.choose(domain=domain, running=running or hands.running)
    what = "texts of all domains" if domain == ALL else f"only {domain_name(domain)} texts"
    return f"{what} are sent, {hands.traffic.running} at a time"


def ban(hands: Hands, expert: int, layer: int | None = None) -> str:
    """Never choose an expert, in one layer or in all."""
    hands.control.ban_expert(layer, expert)
    return f"expert {expert} may not be chosen in {_where(layer)}"


def force(hands: Hands, experts: list[int], layer: int | None = None) -> str:
    """Always choose these experts, in one layer or in all."""
    hands.control.force_experts(experts, layer)
    return f"experts {', '.join(map(str, experts))} are always chosen in {_where(layer)}"


def bias(hands: Hands, expert: int, value: float, layer: int | None = None) -> str:
    """Add a value to an expert's logit, in one layer or in all."""
    hands.control.set_bias(layer, expert, value)
    return f"the logit of expert {expert} gets {value:+g} in {_where(layer)}"


def smooth(hands: Hands, bonus: float) -> str:
    """Give the experts of a sequence's previous token a bonus on their logits."""
    hands.control.set_smoothing(bonus)
    return f"the experts of the previous token get {bonus:+g} on their logits"


def clear_policy(hands: Hands) -> str:
    """Forget bans, forced experts, biases and smoothing."""
    hands.control.clear_policy()
    return "bans, forced experts and biases are forgotten"


ACTIONS: dict[str, Callable[..., str]] = {
    "traffic": traffic,
    "ban": ban,
    "force": force,
    "bias": bias,
    "smooth": smooth,
    "clear-policy": clear_policy,
}
"""By name, as playlists call them."""


def restore(hands: Hands) -> None:
    """Put policy and traffic back as they are at the start; again does nothing."""
    if not hands.control.policy.is_empty:
        hands.control.clear_policy()
    hands.traffic.choose(domain=ALL, running=hands.running, paused=False)


def _where(layer: int | None) -> str:
    return "every layer" if layer is None else f"layer {layer}"
