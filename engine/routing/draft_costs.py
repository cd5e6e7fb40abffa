"""What drafting costs and what its confidence is worth, measured while the engine runs.

Medians of the last few times, so that a step which the machine interrupted decides nothing. Used by
`engine.routing.speculation`; knows nothing of models, only of rows, seconds and counts.
"""

from __future__ import annotations

import bisect
from collections import deque

KEPT = 9
"""Times whose median counts."""
BELIEVED = 3
"""So many times of one number of rows are believed; fewer are not."""
STALE_STEPS = 256
"""Steps after which a number of rows that did not occur again is forgotten: else a few bad times
would keep it from ever being tried again."""
GUESSED_ROW = 0.15
"""Share of a step that one more row is taken to cost while nothing was measured."""
EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
"""Borders of the classes of confidence."""
DOUBT = 4.0
"""Proposals that a class is taken to have seen before the first one, accepted as often as the
middle of the class says."""
MEMORY = 400.0
"""Proposals of a class after which older ones count half."""


class Recent:
    """The median of the last `KEPT` times in seconds."""

    __slots__ = ("_times", "median", "step")

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=KEPT)
        self.median = 0.0
        self.step = 0
        """The number of the step that was the last to add a time."""

    def __len__(self) -> int:
        return len(self._times)

    def add(self, seconds: float) -> None:
        """Take one time."""
        self._times.append(seconds)
        ordered = sorted(self._times)
        self.median = ordered[len(ordered) // 2]


class Costs:
    """Seconds of the target's steps by rows, and of the draft's passes by sequences."""

    def __init__(self) -> None:
        self._steps: dict[int, Recent] = {}
        self._passes: dict[int, Recent] = {}
        self._known: list[int] = []
        """Numbers of rows whose times are believed, in order."""
        self._count = 0
        self.is_new = False
        """Whether a step's time was added since somebody set this to False."""

    def took_step(self, rows: int, seconds: float) -> None:
        """Take the time of a step of the target."""
        self._count += 1
        self.is_new = True
        recent = self._steps.setdefault(rows, Recent())
        recent.add(seconds)
        recent.step = self._count
        if len(recent) == BELIEVED:
            bisect.insort(self._known, rows)
        if self._count % STALE_STEPS == 0:
            self._forget()

    def took_pass(self, sequences: int, seconds: float) -> None:
        """Take the time of a pass of the draft, deciding included."""
        self._passes.setdefault(sequences, Recent()).add(seconds)

    def knows(self, rows: int) -> bool:
        """Whether a step of `rows` rows was measured often enough to be believed."""
        return len(self._steps.get(rows, ())) >= BELIEVED

    def step_s(self, rows: int) -> float:
        """Return the seconds of a step of `rows` rows; 0 before any is believed.

        Between two known numbers of rows the time is on the line between them; beyond the last
        one each row costs what `GUESSED_ROW` says of the step before it. With 1 row in 3 ms and 3
        rows in 4 ms, 2 rows take 3.5 ms and 4 rows 4.2 ms.
        """
        known = self._known
        if not known:
            return 0.0
        place = bisect.bisect_left(known, rows)
        if place < len(known) and known[place] == rows:
            return self._steps[rows].median
        if place == len(known):
            last = known[-1]
            return self._steps[last].median * (1 + GUESSED_ROW * (rows - last) / last)
        above = known[place]
        high = self._steps[above].median
        if place == 0:
            return high / (1 + GUESSED_ROW * (above - rows) / max(1, rows))
        below = known[place - 1]
        low = self._steps[below].median
        return low + (high - low) * (rows - below) / (above - below)

    def _forget(self) -> None:
        """Forget numbers of rows that did not occur lately."""
        oldest = self._count - STALE_STEPS
        self._steps = {rows: one for rows, one in self._steps.items() if one.step > oldest}
        self._known = sorted(rows for rows, one in self._steps.items() if len(one) >= BELIEVED)

    def pass_s(self, sequences: int) -> float:
        """Return the seconds of a draft pass over `sequences` sequences; 0 before the first.

        Taken from the nearest number that was measured, and in proportion where that is smaller.
        """
        if not self._passes:
            return 0.0
        nearest = min(self._passes, key=lambda known: abs(known - sequences))
        return self._passes[nearest].median * max(1.0, sequences / nearest)


class Confidence:
    """How often proposals of a given confidence were accepted."""

    def __init__(self) -> None:
        borders = (0.0, *EDGES, 1.0)
        middles = [(low + high) / 2 for low, high in zip(borders, borders[1:], strict=False)]
        self._accepted = [DOUBT * middle for middle in middles]
        self._judged = [DOUBT for _ in middles]

    def chance(self, confidence: float) -> float:
        """Return the chance, 0 to 1, that a proposal of this confidence is accepted."""
        place = bisect.bisect_right(EDGES, confidence)
        return self._accepted[place] / self._judged[place]

    def judged(self, confidence: float, accepted: bool) -> None:
        """Take what became of one proposal."""
        place = bisect.bisect_right(EDGES, confidence)
        self._accepted[place] += accepted
        self._judged[place] += 1
        if self._judged[place] > MEMORY:
            self._accepted[place] /= 2
            self._judged[place] /= 2

    def table(self) -> list[dict[str, float]]:
        """Return one line per class: from, to, judged (the doubt included) and chance."""
        borders = (0.0, *EDGES, 1.0)
        return [
            {
                "from": low,
                "to": high,
                "judged": round(judged, 1),
                "chance": round(accepted / judged, 4),
            }
            for low, high, accepted, judged in zip(
                borders, borders[1:], self._accepted, self._judged, strict=False
            )
        ]
