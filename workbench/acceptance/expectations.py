"""What a service must reach to be accepted."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.config import at_least
from engine.errors import ConfigError


class NotAcceptedError(Exception):
    """A check found what must not be; the message is one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectations:
    """Limits of the checks."""

    openai_only: bool = False
    """Leave out what only our own service has."""
    num_requests: int = 100
    max_tokens: int = 16
    mean_s: float = 10.0
    p99_s: float = 20.0
    max_skew: float = 6.0
    """Most that an expert's load may be over its even share."""
    capacity_factor: float | None = None
    num_repeats: int = 4

    def __post_init__(self) -> None:
        at_least("requests", self.num_requests, 1)
        at_least("max_tokens", self.max_tokens, 2)
        for name in ("mean_s", "p99_s", "max_skew", "capacity_factor"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} ({value}) must be a number above 0.")


def ensure(holds: bool, sentence: str) -> None:
    """Fail the check unless `holds`.

    Raises:
        NotAcceptedError: it does not.
    """
    if not holds:
        raise NotAcceptedError(sentence)
