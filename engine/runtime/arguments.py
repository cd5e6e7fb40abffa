"""What operators hand in at `engine.runtime.control`, checked and made plain."""

from __future__ import annotations

import pickle
from numbers import Integral, Real
from typing import Any

from engine.errors import FaultError, RoutingError
from engine.faults import Fault


def check_travels(fault: Fault) -> None:
    """Raise `FaultError` unless `fault` can be sent to another process."""
    try:
        pickle.dumps(fault)
    except (pickle.PicklingError, AttributeError, TypeError) as failed:
        raise FaultError(
            f"fault ({fault!r:.80}) must be a function of a module, or a partial of one, because "
            f"it travels to other processes: {failed}."
        ) from None


def layer_of(value: Any) -> int | None:
    """Return an index among the MoE layers, or None for all of them."""
    return None if value is None else whole("layer", value)


def whole(name: str, value: Any) -> int:
    """Return an id as a plain int, numpy's included; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise RoutingError(f"{name} ({value!r}) must be a whole number.")
    return int(value)


def number_of(name: str, value: Any) -> float:
    """Return a plain number, numpy's included; an int stays one, however large."""
    if not is_number(value):
        raise RoutingError(f"{name} ({value!r}) must be a number.")
    return int(value) if isinstance(value, Integral) else float(value)


def is_number(value: Any) -> bool:
    """Say whether `value` is a number, numpy's included; a bool is none."""
    return isinstance(value, Real) and not isinstance(value, bool)
