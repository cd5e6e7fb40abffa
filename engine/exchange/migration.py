"""Carry experts from the ranks that hold them to those that are to hold them.

One message an expert, with all of its state. All ranks go through the same list of moves in its
order, each doing its own part, so nobody can wait in a circle. Used by `engine.cluster.experts`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.exchange.group import Group
from engine.exchange.plan import Move

Pair = tuple[Tensor, Tensor]
"""One expert: gate and up (2F, D), down (D, F)."""
Key = tuple[int, int]
"""Layer and expert."""


def carry(
    moves: Sequence[Move],
    group: Group,
    give: Callable[[int, int], Pair],
    blank: Callable[[], Pair],
) -> dict[Key, Pair]:
    """Send and receive this rank's part of `moves`; returns what has come.

    Waits for each move before the next; nothing overlaps. A move without a source is left out.

    Args:
        moves: the same list on every rank of the group.
        group: holds every source and target.
        give: returns an expert of this rank, by layer and expert.
        blank: returns room for one that comes.

    Raises:
        ExchangeError: a rank died or did not answer in time.
    """
    arrived: dict[Key, Pair] = {}
    for tag, move in enumerate(moves):
        what = f"expert {move.expert} of layer {move.layer}"
        if move.source == group.me:
            group.send_to(_packed(give(move.layer, move.expert)), move.target, tag, what)
        elif move.target == group.me and move.source >= 0:
            pair = blank()
            packet = _packed(pair)
            group.receive_from(packet, move.source, tag, what)
            _unpack(packet, pair)
            arrived[move.layer, move.expert] = pair
    return arrived


def travellers(moves: Sequence[Move]) -> list[int]:
    """Return the ranks that send or receive, ascending."""
    return sorted({r for move in moves if move.source >= 0 for r in (move.source, move.target)})


def _packed(pair: Pair) -> Tensor:
    """Return an expert as the bytes of one message."""
    return torch.cat([part.contiguous().view(torch.uint8).flatten() for part in pair])


def _unpack(packet: Tensor, pair: Pair) -> None:
    start = 0
    for part in pair:
        room = part.view(torch.uint8)
        room.copy_(packet[start : start + room.numel()].view_as(room))
        start += room.numel()
