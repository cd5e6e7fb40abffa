"""What an operator may tell the gate: ban, force or favour experts.

A policy is immutable, like the table; `engine.runtime.control` swaps it between steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from engine.errors import RoutingError
from engine.kernels.topk import Selection
from engine.routing.capacity import check_factor
from engine.routing.precision.thresholds import Precision
from engine.routing.smoothing import Smoothing


@dataclass(frozen=True, slots=True)
class LayerPolicy:
    """The policy of one layer over E experts."""

    banned_E: Tensor
    """(E,) bool: never chosen."""
    forced_E: Tensor
    """(E,) bool: always chosen; their weights stay their own scores."""
    bias_E: Tensor
    """(E,) fp32: added to the logits, so it changes who is chosen and how much they weigh."""

    def select(self, topk: Callable[..., Any], logits_TE: Tensor) -> Selection:
        """Run the selection `topk`, already bound to its k, under this policy."""
        selection: Selection = topk(
            logits_TE + self.bias_E,
            preferred_E=self.forced_E,
            banned_E=self.banned_E,
        )
        return selection


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingPolicy:
    """Bans, forced experts, biases, smoothing and capacity of all MoE layers.

    A layer of None is each of them.
    """

    num_layers: int
    num_experts: int
    top_k: int
    banned: frozenset[tuple[int, int]] = frozenset()
    forced: frozenset[tuple[int, int]] = frozenset()
    bias: dict[tuple[int, int], float] = field(default_factory=dict)
    smoothing: float = 0.0
    """Bonus on the experts used lately, see `engine.routing.smoothing`; 0 is off."""
    smoothing_window: int = 1
    """Tokens for which an expert counts as used lately."""
    smoothing_decay: float = 1.0
    """Factor on the bonus for every further token since the last use."""
    capacity_factor: float | None = None
    """Of `engine.routing.capacity`; None drops nothing."""
    precision: Precision = field(default_factory=Precision)
    """Number formats of the experts, see `engine.routing.precision`."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is set, so that the gate can skip the policy."""
        return not (
            self.banned or self.forced or self.bias or self.smoothing or self.capacity_factor
        )

    @property
    def lean(self) -> Smoothing:
        """The smoothing in force."""
        return Smoothing(self.smoothing, self.smoothing_window, self.smoothing_decay)

    def ban(self, layer: int | None, expert: int) -> RoutingPolicy:
        """Return a policy in which `expert` is never chosen in `layer`."""
        return replace(self, banned=self.banned | set(self._cells(layer, expert))).checked()

    def force(self, layer: int | None, expert: int) -> RoutingPolicy:
        """Return a policy in which `expert` is always chosen in `layer`."""
        return replace(self, forced=self.forced | set(self._cells(layer, expert))).checked()

    def favour(self, layer: int | None, expert: int, value: float) -> RoutingPolicy:
        """Return a policy that adds `value` to the logit of `expert` in `layer`."""
        if not -1e4 <= value <= 1e4:
            raise RoutingError(f"bias ({value}) must be a number between -10000 and 10000.")
        return replace(self, bias=self.bias | dict.fromkeys(self._cells(layer, expert), value))

    def smoothed(self, bonus: float, window: int = 1, decay: float = 1.0) -> RoutingPolicy:
        """Return a policy that smooths by `bonus` over `window` tokens.

        Raises:
            RoutingError: a number is out of range.
        """
        lean = Smoothing(bonus, window, decay)
        return replace(
            self,
            smoothing=float(lean.strength),
            smoothing_window=lean.window,
            smoothing_decay=float(lean.decay),
        )

    def limited(self, factor: float | None) -> RoutingPolicy:
        """Return a policy that lets each expert take `factor` times its even share of rows.

        Raises:
            RoutingError: the factor is out of range.
        """
        check_factor(factor)
        return replace(self, capacity_factor=factor)

    def layers(self) -> tuple[LayerPolicy | None, ...]:
        """Return one policy per MoE layer, None where nothing is set."""
        return tuple(self._layer(layer) for layer in range(self.num_layers))

    def checked(self) -> RoutingPolicy:
        """Return the policy itself if every layer can still choose `top_k` experts.

        Raises:
            RoutingError: too many experts are banned or forced, or one is both.
        """
        for layer in range(self.num_layers):
            banned = [e for row, e in self.banned if row == layer]
            forced = [e for row, e in self.forced if row == layer]
            if self.num_experts - len(banned) < self.top_k:
                raise RoutingError(
                    f"layer {layer} has {len(banned)} of {self.num_experts} experts banned; top-"
                    f"{self.top_k} routing needs {self.top_k} left. Ban fewer."
                )
            if len(forced) > self.top_k:
                raise RoutingError(
                    f"layer {layer} has {len(forced)} experts forced; at most top_k ({self.top_k}) "
                    "can be. Force fewer."
                )
            if both := set(banned) & set(forced):
                raise RoutingError(
                    f"expert {min(both)} of layer {layer} is both banned and forced."
                )
        return self

    def _cells(self, layer: int | None, expert: int) -> list[tuple[int, int]]:
        if not 0 <= expert < self.num_experts:
            raise RoutingError(f"expert ({expert}) must lie between 0 and {self.num_experts - 1}.")
        if layer is not None and not 0 <= layer < self.num_layers:
            raise RoutingError(f"layer ({layer}) must lie between 0 and {self.num_layers - 1}.")
        layers = range(self.num_layers) if layer is None else (layer,)
        return [(row, expert) for row in layers]

    def _layer(self, layer: int) -> LayerPolicy | None:
        banned = [e for row, e in self.banned if row == layer]
        forced = [e for row, e in self.forced if row == layer]
        bias = {e: value for (row, e), value in self.bias.items() if row == layer}
        if not (banned or forced or bias):
            return None
        bias_E = torch.zeros(self.num_experts)
        for expert, value in bias.items():
            bias_E[expert] = value
        return LayerPolicy(_mask(banned, self.num_experts), _mask(forced, self.num_experts), bias_E)


def _mask(experts: list[int], num_experts: int) -> Tensor:
    mask_E = torch.zeros(num_experts, dtype=torch.bool)
    mask_E[experts] = True
    return mask_E
