"""Smoothing: a token leans towards the experts its predecessor in the same sequence used.

Where neighbouring tokens' scores lie close together, tiny differences make them jump between
experts, and the exchange sees another pattern every step. A bonus on the logits of the experts the
previous token ran on keeps such tokens together; a token that clearly wants another expert still
gets it. Like an operator's bias, the bonus changes who is chosen and how much they weigh.

A token depends on its own sequence alone, so results do not change with the batch. Off, nothing
here is made or asked. On, rows are chosen in waves, the first of each chunk together, then the
second: a decode step is one wave, a prompt as many as it has tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.kernels.topk import Selection, joined

Choose = Callable[[Tensor], Selection]
"""Takes (R, E) logits and chooses each row's experts."""


class Smoother:
    """The smoothing of one step over S chunks of T rows, in L layers."""

    def __init__(self, bonus: float, lengths: Sequence[int], previous_SLK: Tensor) -> None:
        """Prepare a step.

        Args:
            bonus: added to the logits of the previous token's experts.
            lengths: rows of each of the S chunks, which follow each other in the batch.
            previous_SLK: (S, L, K) int64 the experts of the token before each chunk, -1 for none.
        """
        self.bonus = bonus
        self.previous_SLK = previous_SLK.clone()
        """Once all layers have chosen: the experts of each chunk's last token."""
        self._waves = waves(lengths, previous_SLK.device)

    def select(self, choose: Choose, logits_TE: Tensor, layer: int) -> Selection:
        """Choose all T rows of one layer, each in the light of its predecessor."""
        parts = []
        for rows_R, chunks_R in self._waves:
            previous_RK = self.previous_SLK[chunks_R, layer]
            part = choose(favour(logits_TE[rows_R], previous_RK, self.bonus))
            self.previous_SLK[chunks_R, layer] = part.topk_ids_TK
            parts.append(part)
        if len(parts) == 1:  # one row a chunk: the wave's order is the batch's
            return parts[0]
        back_T = torch.argsort(torch.cat([rows_R for rows_R, _ in self._waves]))
        return joined(parts, back_T)


def favour(logits_RE: Tensor, previous_RK: Tensor, bonus: float) -> Tensor:
    """Add `bonus` where each row's previous token went.

    Logits ``[[1, 0, 0]]`` with previous ``[[2, -1]]`` and bonus 0.5 give ``[[1, 0, 0.5]]``.
    """
    given_RK = torch.where(previous_RK >= 0, bonus, 0.0)
    return logits_RE.scatter_add(-1, previous_RK.clamp(min=0), given_RK)


def waves(
    lengths: Sequence[int], device: torch.device | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Return for each wave its rows and the chunks they belong to.

    Chunks of 3 and 1 rows give rows ``[0, 3]``, ``[1]``, ``[2]`` of chunks ``[0, 1]``, ``[0]``,
    ``[0]``.
    """
    starts = [sum(lengths[:chunk]) for chunk in range(len(lengths))]
    found = []
    for turn in range(max(lengths, default=0)):
        chunks = [chunk for chunk, length in enumerate(lengths) if length > turn]
        rows = [starts[chunk] + turn for chunk in chunks]
        found.append((torch.tensor(rows, device=device), torch.tensor(chunks, device=device)))
    return found
