"""What the workbench's tests share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(
            one, other, equal_nan=one.dtype.kind == "f"
        )
    if is_dataclass(one):
        return type(one) is type(other) and all(
            _same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one)
        )
    if isinstance(one, tuple | list):
        return (
            type(one) is type(other)
            and len(one) == len(other)
            and all(map(_same, one, other))
        )
    return type(one) is type(other) and one == other


@pytest.fixture(scope="session")
def same() -> Callable[[Any, Any], bool]:
    """Compare two values, records and arrays included, by type and bit."""
    return _same
