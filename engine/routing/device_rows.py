"""Share a few rows among replicas, one row after the other: what `device` does with arrays.

In a step of few rows it is calls that cost, above all of code that the experts' weights have driven
out of the processor's caches: a loop of Python over 64 rows takes a third of thirty operations on
arrays of 64. The law is the same, and so is every answer; with many rows, replicas or devices the
arrays win.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, repeat
from typing import NamedTuple

import numpy as np

from engine.routing.table import Int, RoutingTable

TILE_ROWS = 16
"""Rows that an expert computes at once; a row more in a tile that is begun costs no time."""
ONLY, HOME, FULL, AWAY = range(4)
"""Why a replica was taken: it is the only one; it is at the token's home; the one at home had its
share of rows; there is none at home."""
REASON_BITS = 2
MOST_WORK = 192
"""Rows, and cells of a replicated expert and a device or replica, up to which a loop is faster."""


class _Expert(NamedTuple):
    """One expert with several replicas, which are in the order of the table."""

    physical: tuple[int, ...]
    homes: tuple[int, ...]
    """For each replica the device that it is at home on; -1 for a second one on a device."""
    own: dict[int, int]
    """By device the physical expert that is at home there."""
    turn: int
    """Moves the rounding on from expert to expert and layer to layer."""


class FewRows:
    """What a table says of one layer, as a loop reads it."""

    def __init__(self, table: RoutingTable, layer: int) -> None:
        self.num_experts, self.num_devices = table.num_experts, table.num_devices
        self._only: dict[int, Iterator[int]] = {}
        self._experts: dict[int, _Expert] = {}
        ranks = table.rank_of_phy.tolist()
        for expert, row in enumerate(table.log2phy[layer].tolist()):
            physical = tuple(one for one in row if one >= 0)
            if len(physical) > 1:
                self._experts[expert] = _replicated(physical, ranks, expert + layer)
                continue
            for device in range(self.num_devices):
                code = row[0] << REASON_BITS | ONLY
                self._only[device * self.num_experts + expert] = repeat(code)
        self._cells = sum(len(one.physical) + self.num_devices for one in self._experts.values())

    def suits(self, num_rows: int) -> bool:
        """Say whether a loop over so many (token, slot) pairs is faster than arrays."""
        return num_rows + self._cells <= MOST_WORK

    def place(self, ids_TK: Int, homes_T: Int, rows_GE: Int | None) -> Int:
        """Return (T·K,) ``physical << REASON_BITS | why`` of each pair; see `device.Placer.place`.

        Raises:
            KeyError: an id is no expert, or a home no device.
        """
        num_experts = self.num_experts
        cells_N = (homes_T[:, None] * num_experts + ids_TK).ravel().tolist()
        rows = Counter(cells_N)
        ways = self._only.copy()
        for expert in {cell % num_experts for cell in rows} & self._experts.keys():
            if rows_GE is None:
                rows_G = [rows[d * num_experts + expert] for d in range(self.num_devices)]
            else:
                rows_G = rows_GE[:, expert].tolist()
            shared = _shared(self._experts[expert], rows_G)
            ways |= {device * num_experts + expert: way for device, way in enumerate(shared)}
        return np.array([next(ways[cell]) for cell in cells_N], np.int64)


def _replicated(physical: tuple[int, ...], ranks: list[int], turn: int) -> _Expert:
    own: dict[int, int] = {}
    homes = []
    for one in physical:
        device = ranks[one]
        homes.append(-1 if device in own else device)
        own.setdefault(device, one)
    return _Expert(physical, tuple(homes), own, turn)


def _shared(expert: _Expert, rows_G: list[int]) -> list[Iterator[int]]:
    """Return for each device the codes of its rows of one expert, in their order.

    With replicas 0 and 5 on devices 0 and 1 and rows ``[48, 2]``: device 0 has 32 rows for physical
    expert 0, `HOME`, and 16 for 5, `FULL`; device 1 has 2 for 5, `HOME`.
    """
    away = sum(rows_G)
    share = -(-away // len(expert.physical))
    most = -(-share // TILE_ROWS) * TILE_ROWS
    own, kept = expert.own, {}
    for device in own:
        kept[device] = stay = rows_G[device] if rows_G[device] < most else most
        away -= stay
    line: list[int] = []
    if away:
        room_R = [max(share - kept.get(device, 0), 0) for device in expert.homes]
        line = _dealt(expert, room_R, away)
    ways: list[Iterator[int]] = []
    before = 0
    for device, rows in enumerate(rows_G):
        if device in own:
            codes, why = [own[device] << REASON_BITS | HOME] * kept[device], FULL
        else:
            codes, why = [], AWAY
        if until := rows - len(codes):
            codes += [one << REASON_BITS | why for one in line[before : before + until]]
            before += until
        ways.append(iter(codes))
    return ways


def _dealt(expert: _Expert, room_R: list[int], away: int) -> list[int]:
    """Return the physical experts of `away` rows, in proportion to their room."""
    until_R = list(accumulate(room_R))
    room = max(until_R[-1], 1)
    line: list[int] = []
    for physical, until in zip(expert.physical, until_R, strict=True):
        edge = (until * away + expert.turn % room) // room
        line += [physical] * (edge - len(line))
    return line
