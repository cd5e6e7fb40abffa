"""The course of a drill's signals: the newest samples, and the curve that is drawn of them.

The drill samples the signals that cost little once a second; a signal that it does not sample has
the points at which somebody measured. Seconds count from the fault.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

SHOWN_S = 300.0
"""What a curve shows at most, up to now."""
LEAST_S = 60.0
"""What it shows at least, so that the first samples do not race across."""
GAP_S = 3.5
"""Two samples further apart are not joined: after an act there are none for a while."""
MAX_POINTS = 600
WIDE, HIGH = 100.0, 40.0
"""The curve's own units; the page stretches them."""
_EDGE = 2.0

Point = tuple[float, float]
"""Seconds, and a value."""


class Course:
    """The newest samples of a drill's signals, and when something was done."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        """Take the signals' names and what each is called in a drill's state."""
        self._keys = dict(keys)
        self._points: dict[str, deque[Point]] = {name: deque(maxlen=MAX_POINTS) for name in keys}
        self._last: tuple[Any, Any] = (None, {})
        self.acts: deque[float] = deque(maxlen=MAX_POINTS)
        self.now_s = 0.0

    def take(self, state: Mapping[str, Any]) -> None:
        """Take a drill's state; a sample that was taken before adds nothing."""
        self.now_s = float(state.get("elapsed_s", self.now_s))
        values = state.get("signals") or {}
        at_s = state.get("sampled_s")
        if (at_s, values) == self._last:
            return
        self._last = at_s, dict(values)
        for name, key in self._keys.items():
            if key in values:
                self._add(name, self.now_s if at_s is None else at_s, values[key])

    def measured(self, signals: Sequence[Mapping[str, Any]]) -> None:
        """Take the verdicts of a measurement that was asked for."""
        for verdict in signals:
            if verdict["value"] is not None:
                self._add(verdict["name"], self.now_s, verdict["value"])

    def acted(self, at_s: Iterable[float]) -> None:
        """Take the seconds at which something was done."""
        self.acts = deque(at_s, maxlen=MAX_POINTS)

    def points(self, name: str) -> tuple[Point, ...]:
        """Return the samples of a signal, oldest first."""
        return tuple(self._points.get(name, ()))

    def _add(self, name: str, at_s: float, value: float) -> None:
        points = self._points.get(name)
        if points is not None and (not points or at_s > points[-1][0]):
            points.append((float(at_s), float(value)))


class Curve(NamedTuple):
    """What is drawn of one signal, in a picture of `WIDE` x `HIGH`."""

    line: str
    """SVG path through the samples, broken where there were none."""
    newest: str
    """SVG path of a dot at the newest."""
    acts: str
    """SVG path of one upright line an act."""
    band: tuple[float, float]
    """Top and height of the right values; no height where they are not known."""


def curve(
    points: Sequence[Point],
    acts: Sequence[float],
    now_s: float,
    right: tuple[float, float] | None,
) -> Curve:
    """Draw a signal from 0 at the bottom to its highest value, over the last `SHOWN_S` seconds.

    Args:
        points: samples, oldest first.
        acts: seconds at which something was done.
        now_s: the right edge, from `LEAST_S` on.
        right: lowest and highest right value; None where that is not known.
    """
    begin = max(0.0, now_s - SHOWN_S)
    span = max(now_s, begin + LEAST_S) - begin
    shown = [point for point in points if point[0] >= begin]
    top = max([value for _, value in shown] + list(right or ()), default=0.0) * 1.08 or 1.0

    def x(at_s: float) -> float:
        return _EDGE + (WIDE - 2 * _EDGE) * (at_s - begin) / span

    def y(value: float) -> float:
        return HIGH - _EDGE - (HIGH - 2 * _EDGE) * min(max(value, 0.0), top) / top

    line, before_s = [], float("-inf")
    for at_s, value in shown:
        line.append(f"{'L' if at_s - before_s <= GAP_S else 'M'}{x(at_s):.1f} {y(value):.1f}")
        before_s = at_s
    low, high = right or (0.0, 0.0)
    # A band of one value is still to be seen.
    band = (y(high) - 0.75, y(low) - y(high) + 1.5) if right else (0.0, 0.0)
    return Curve(
        line="".join(line),
        newest=f"M{x(shown[-1][0]):.1f} {y(shown[-1][1]):.1f}h0" if shown else "",
        acts="".join(f"M{x(at_s):.1f} 0V{HIGH:g}" for at_s in acts if at_s >= begin),
        band=band,
    )


def in_words(points: Sequence[Point], now_s: float) -> str:
    """Say what a curve shows: `18 samples over the last 42 s, from 1.41 to 2.6, now 2.28`."""
    shown = [point for point in points if point[0] >= now_s - SHOWN_S]
    if not shown:
        return "no samples yet"
    values = [value for _, value in shown]
    count = f"{len(shown)} sample{'' if len(shown) == 1 else 's'}"
    return (
        f"{count} over the last {now_s - shown[0][0]:.0f} s, from {min(values):.3g} "
        f"to {max(values):.3g}, newest {values[-1]:.3g}"
    )
