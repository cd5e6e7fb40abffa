"""Smoothing: a token leans towards the experts that its sequence used lately.

Where neighbouring tokens' scores lie close together, tiny differences make them jump between
experts, and the exchange sees another pattern every step. A bonus on the logits of the experts used
lately keeps such tokens together; a token that clearly wants another expert still gets it. Like an
operator's bias, the bonus changes who is chosen and how much they weigh.

A token depends on its own sequence alone, so results do not change with the batch. Off, nothing
here is made or asked. A decode step takes one choice, as without smoothing. In a prompt each token
waits for the one before: rows are chosen in windows of `WIDTH`, all rows of a window at once from a
guess of what their predecessors choose, again and again until the guess comes true. The first row
of a window is right at the first sweep, the second at the second at the latest, and so on; mostly a
few sweeps do. What stays when nothing changes any more is what one row at a time would choose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.errors import RoutingError
from engine.kernels.topk import Selection, joined

Choose = Callable[[Tensor], Selection]
"""Takes (R, E) logits and chooses each row's experts."""

MAX_STRENGTH = 100.0
MAX_WINDOW = 64
NEVER = MAX_WINDOW + 1
"""The age of an expert that was used longer ago than any window, or not at all."""
WIDTH = 32
"""Rows of a chunk that are guessed at a time."""


@dataclass(frozen=True, slots=True)
class Smoothing:
    """How strongly, how long and how fadingly the past counts."""

    strength: float = 0.0
    """Added to the logit of an expert that the previous token used; 0 is off."""
    window: int = 1
    """Tokens an expert is remembered after its last use."""
    decay: float = 1.0
    """Factor on the bonus for every further token since then."""

    def __post_init__(self) -> None:
        if not 0 <= self.strength <= MAX_STRENGTH:
            raise RoutingError(
                f"bonus ({self.strength}) must be a number between 0 and {MAX_STRENGTH:g}."
            )
        if not 1 <= self.window <= MAX_WINDOW:
            raise RoutingError(
                f"window ({self.window}) must be a whole number of 1 to {MAX_WINDOW} tokens."
            )
        if not 0 < self.decay <= 1:
            raise RoutingError(f"decay ({self.decay}) must be above 0 and at most 1.")

    def __bool__(self) -> bool:
        return self.strength > 0

    def by_age(self) -> list[float]:
        """Return the bonus of an expert last used `age` tokens ago, for ages 0 to `NEVER`.

        Strength 1, window 2, decay 0.5 give ``[0, 1, 0.5, 0, …]``: no expert has age 0.
        """
        ages = range(1, NEVER + 1)
        return [
            0.0,
            *(self.strength * self.decay ** (age - 1) * (age <= self.window) for age in ages),
        ]


class Window(NamedTuple):
    """Rows that are chosen together: at most `WIDTH` of each chunk, one chunk after the other."""

    rows_R: Tensor
    """(R,) int64 rows of the batch."""
    chunks_R: Tensor
    """(R,) the chunk each belongs to."""
    first_R: Tensor
    """(R,) where the rows of its chunk begin among the R."""
    last: Tensor
    """The last row of each chunk among the R."""
    chunks: Tensor
    """The chunks, in the order of `last`."""


class Smoother:
    """The smoothing of one step over S chunks of T rows, in L layers of E experts."""

    def __init__(self, smoothing: Smoothing, lengths: Sequence[int], ages_SLE: Tensor) -> None:
        """Prepare a step.

        Args:
            smoothing: in force.
            lengths: rows of each of the S chunks, which follow each other in the batch.
            ages_SLE: (S, L, E) int64, for the token before each chunk: how many tokens before the
                chunk's first row an expert was last used, 1 by that token itself; `NEVER`.
        """
        self.ages_SLE = ages_SLE.clone()
        """Once all layers have chosen: the same for what follows each chunk."""
        self.sweeps = 0
        """Choices of a window made so far, over all layers."""
        self._bonus_by_age = torch.tensor(smoothing.by_age(), device=ages_SLE.device)
        self._windows = windows(lengths, ages_SLE.device)

    def select(self, choose: Choose, logits_TE: Tensor, layer: int) -> tuple[Selection, Tensor]:
        """Choose all T rows of one layer, each in the light of those before it.

        Returns:
            the choice, and (T, E) the bonus it was made with.
        """
        parts, bonuses = [], []
        for window in self._windows:
            part, bonus_RE = self._select(choose, logits_TE[window.rows_R], window, layer)
            parts.append(part)
            bonuses.append(bonus_RE)
        if len(parts) == 1:
            return parts[0], bonuses[0]
        back_T = torch.argsort(torch.cat([window.rows_R for window in self._windows]))
        return joined(parts, back_T), torch.cat(bonuses)[back_T]

    def _select(
        self, choose: Choose, logits_RE: Tensor, window: Window, layer: int
    ) -> tuple[Selection, Tensor]:
        """Choose the rows of one window and move the ages past them."""
        before_RE = self.ages_SLE[window.chunks_R, layer]
        ages_RE, chosen = self._aged(before_RE, None, window), None
        while True:
            bonus_RE = self._bonus_by_age[ages_RE]
            found = choose(logits_RE + bonus_RE)
            self.sweeps += 1
            single = len(window.rows_R) == len(window.last)
            if single or (chosen is not None and torch.equal(found.topk_ids_TK, chosen)):
                break
            chosen = found.topk_ids_TK
            ages_RE = self._aged(before_RE, chosen, window)
        after_SE = (ages_RE[window.last] + 1).clamp(max=NEVER)
        self.ages_SLE[window.chunks, layer] = after_SE.scatter(1, found.topk_ids_TK[window.last], 1)
        return found, bonus_RE

    @staticmethod
    def _aged(before_RE: Tensor, topk_ids_RK: Tensor | None, window: Window) -> Tensor:
        """Return (R, E) the ages each row sees, if the rows choose `topk_ids_RK`; None: nothing."""
        at_R1 = torch.arange(len(before_RE), device=before_RE.device).unsqueeze(1)
        first_R1 = window.first_R.unsqueeze(1)
        ages_RE = (before_RE + at_R1 - first_R1).clamp(max=NEVER)
        if topk_ids_RK is None:
            return ages_RE
        used_RE = torch.full_like(before_RE, -1).scatter_(
            1, topk_ids_RK, at_R1.expand_as(topk_ids_RK)
        )
        last_RE = torch.full_like(used_RE, -1)
        last_RE[1:] = used_RE.cummax(0).values[:-1]
        since_RE = (at_R1 - last_RE).clamp(max=NEVER)
        return torch.where(last_RE >= first_R1, since_RE, ages_RE)


def windows(
    lengths: Sequence[int], device: torch.device | None = None, width: int = WIDTH
) -> list[Window]:
    """Cut S chunks into windows of at most `width` rows each.

    Chunks of 3 and 1 rows with width 2 give rows ``[0, 1, 3]`` of chunks ``[0, 0, 1]``, whose rows
    begin at ``[0, 0, 2]`` among them and end at ``[1, 2]``, then row ``[2]``.
    """
    starts = [sum(lengths[:chunk]) for chunk in range(len(lengths))]
    found = []
    for turn in range(0, max(lengths, default=0), width):
        rows: list[int] = []
        chunks: list[int] = []
        first: list[int] = []
        last: list[int] = []
        taking = [chunk for chunk, length in enumerate(lengths) if length > turn]
        for chunk in taking:
            own = range(starts[chunk] + turn, starts[chunk] + min(lengths[chunk], turn + width))
            first += [len(rows)] * len(own)
            rows += own
            chunks += [chunk] * len(own)
            last.append(len(rows) - 1)
        columns = (rows, chunks, first, last, taking)
        found.append(Window._make(torch.tensor(column, device=device) for column in columns))
    return found
