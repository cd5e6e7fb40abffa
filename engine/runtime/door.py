"""What lies behind the operators' door: the policy in force, and orders on their way to ranks."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine.routing.policy import LayerPolicy, RoutingPolicy


class InForce(NamedTuple):
    """A policy and what it means layer by layer, swapped together."""

    policy: RoutingPolicy
    layers: tuple[LayerPolicy | None, ...]
    """One per MoE layer, None where nothing is set."""
    words: str
    """The policy written down; the same for the same policy."""

    @classmethod
    def of(cls, policy: RoutingPolicy) -> InForce:
        """Work out what a policy means."""
        return cls(policy, policy.layers(), str(in_words(policy)))


class Order(NamedTuple):
    """Something only the thread that steps the engine can do, because ranks must take part."""

    action: str
    """`publish_table`, `drain`, `add_rank`, `set_fault` or `set_exchange`."""
    value: Any


@dataclass(slots=True)
class Door:
    """Orders on their way to an engine on several ranks."""

    num_ranks: int = 1
    drill: bool = False
    deterministic: bool = False
    both_formats: bool = False
    """Whether the engine holds its experts in its own format and in int8."""
    orders: deque[Order] = field(default_factory=deque)

    @property
    def stages(self) -> bool:
        """Whether a change must reach other processes first."""
        return self.num_ranks > 1


def in_words(policy: RoutingPolicy) -> dict[str, Any]:
    """Return a policy as plain values, the same for the same policy."""
    return {
        "banned": sorted(policy.banned),
        "forced": sorted(policy.forced),
        "bias": [[*cell, value] for cell, value in sorted(policy.bias.items())],
        "smoothing": policy.smoothing,
        "smoothing_window": policy.smoothing_window,
        "smoothing_decay": policy.smoothing_decay,
        "capacity_factor": policy.capacity_factor,
        "precision": policy.precision.in_words(),
    }
