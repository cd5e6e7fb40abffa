"""What all layers of one model are built from and share.

Made where a model is loaded; the layers take from it what they need.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.exchange.dispatch import Dispatcher
from engine.faults import Faults
from engine.kernels.registry import Ops


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The operations, fault points and exchange of one model."""

    ops: Ops
    faults: Faults
    dispatcher: Dispatcher
    """Moves rows to their experts."""
    num_slots: int | None = None
    """Experts that each MoE layer holds; None holds all."""
