"""What a view can be in, and how that is said: one table of state -> symbol + word + colour role.

Colour is never the only signal, so every screen shows the symbol and the word with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Look:
    """How one state is shown."""

    symbol: str
    word: str
    tone: str
    """A role of `theme.COLOURS`."""


STATES: dict[str, Look] = {
    "connecting": Look("◌", "Connecting", "muted"),
    "loading": Look("◌", "Loading the model", "muted"),
    "live": Look("●", "Live", "good"),
    "idle": Look("○", "Idle", "muted"),
    "paused": Look("‖", "Traffic paused", "muted"),
    "replay": Look("▶", "Recording", "good"),
    "held": Look("‖", "Recording held", "muted"),
    "stalled": Look("▲", "Stalled", "warn"),
    "gone": Look("■", "Engine gone", "bad"),
    "refused": Look("■", "Refused", "bad"),
}


class Limit(NamedTuple):
    """One mark on the overhead meter."""

    up_to: float
    symbol: str
    words: str
    tone: str


OVERHEAD_LIMITS = (
    Limit(0.05, "✓", "within 5 %", "good"),
    Limit(0.10, "▲", "above 5 %: watch it", "warn"),
    Limit(float("inf"), "■", "above 10 %: redesign", "bad"),
)
"""The rule for routing overhead: above 5 % of the step watch it, above 10 % rebuild the router."""


def overhead_limit(share: float) -> Limit:
    """Return the first limit that `share` (0 to 1) does not exceed."""
    return next(limit for limit in OVERHEAD_LIMITS if share <= limit.up_to)
