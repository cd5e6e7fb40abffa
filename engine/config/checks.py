"""Checks that configs share: each raises a `ConfigError` with name, value and what is allowed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from engine.errors import ConfigError, nearest

C = TypeVar("C")


def from_mapping(cls: type[C], values: Mapping[str, Any]) -> C:
    """Build a config dataclass from a mapping, refusing keys it does not have.

    Raises:
        ConfigError: an unknown key (the nearest known one is named) or a missing one.
    """
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise ConfigError(
                f"unknown option {key!r} for {cls.__name__}{nearest(key, known)} "
                f"known options: {', '.join(known)}."
            )
    try:
        return cls(**values)
    except TypeError as wrong:
        raise ConfigError(f"{cls.__name__} cannot be made: {wrong}.") from None


def one_of(name: str, value: str, allowed: Iterable[str]) -> None:
    """Raise `ConfigError` unless `value` is one of `allowed`."""
    allowed = tuple(allowed)
    if value not in allowed:
        raise ConfigError(
            f"{name} ({value}) must be one of {', '.join(allowed)}{nearest(value, allowed)}"
        )


def at_least(name: str, value: Any, low: int) -> None:
    """Raise `ConfigError` unless `value` is an int (not a bool) of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name} ({value!r}) must be a whole number of at least {low}.")


def within(name: str, value: Any, low: int, high: int) -> None:
    """Raise `ConfigError` unless `value` is an int (not a bool) from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} ({value!r}) must lie between {low} and {high}.")


def number(name: str, value: Any) -> float:
    """Return `value` as a float; raise `ConfigError` unless it is a number (not a bool)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} ({value!r}) must be a number.")
    return float(value)
