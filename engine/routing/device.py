"""Level 4: which replica of an expert runs a token, hence which device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.routing.cache import LookUps
from engine.routing.table import RoutingTable

TILE_ROWS = 16
"""Rows that an expert computes at once; a row more in a tile that is begun costs no time."""

ONLY, HOME, FULL, AWAY = range(4)
"""Why a replica was taken: it is the only one; it is at the token's home; the one at home had its
share of rows; there is none at home."""


class Placement(NamedTuple):
    """Where the rows of one layer went, and why; read by the record of decisions."""

    phy_ids_TK: Tensor
    """(T, K) int64 physical experts."""
    why_TK: Tensor | None
    """(T, K) int64 `ONLY`, `HOME`, `FULL` or `AWAY`; None where no expert has replicas."""


class Placer:
    """Shares each expert's rows among its replicas: at home first, without starving the others.

    The same step under the same table is placed the same: nothing is kept from step to step but
    the look-ups of the last table.
    """

    def __init__(self) -> None:
        self._table: RoutingTable | None = None
        self._layer = -1
        self.look_ups: LookUps[Placement] = LookUps()
        self.last: Placement
        """What the last call decided."""
        self.found = False
        """Whether it was looked up."""

    def place(
        self,
        topk_ids_TK: Tensor,
        homes_T: Tensor,
        table: RoutingTable,
        layer: int,
        rows_GE: Tensor | None = None,
    ) -> Tensor:
        """Return (T, K) the physical expert of each (token, slot).

        A replica takes the rows of its own device up to its fair share, N rows by R replicas,
        rounded up to whole tiles. What is left over, and the rows of devices without a replica, go
        to the replicas below their share, in order of devices, so that a device sends to few
        others. So no replica runs more rows than a fair share in whole tiles.

        With replicas of expert 0 on devices 0 and 1, and 48 rows from device 0 and 2 from device
        1, the share is 25, in tiles 32: device 0 keeps 32 and sends 16, device 1 keeps its own.

        Args:
            topk_ids_TK: (T, K) int64 logical experts, no -1.
            homes_T: (T,) int64 the device whose attention owns each token.
            table: read once per step.
            layer: index among the table's MoE layers.
            rows_GE: (G, E) int64 rows that each device brings for each expert in this step; None
                counts them here, which is right when all tokens of the step are here.
        """
        self.found = False
        if table.is_identity:
            self.last = Placement(topk_ids_TK, None)
            return topk_ids_TK
        if self._table is not table or self._layer != layer:
            self._replicas = _Replicas(table, layer, topk_ids_TK.device)
            self._table, self._layer = table, layer
            self.look_ups.forget()
        key = self.look_ups.key(topk_ids_TK, homes_T) if rows_GE is None else None
        placed = None if key is None else self.look_ups.get(key)
        self.found = placed is not None
        if placed is None:
            placed = self._work_out(topk_ids_TK, homes_T, rows_GE)
            if key is not None:
                self.look_ups.keep(key, placed)
        self.last = placed
        return placed.phy_ids_TK

    def _work_out(self, topk_ids_TK: Tensor, homes_T: Tensor, rows_GE: Tensor | None) -> Placement:
        replicas = self._replicas
        only_TK = replicas.first_E[topk_ids_TK]
        if not replicas.num_experts:
            return Placement(only_TK, None)
        which_TK = replicas.index_E[topk_ids_TK]
        cells_TK = homes_T.unsqueeze(1) * replicas.num_columns + which_TK
        counts_C, turn_N = _count(cells_TK.flatten(), replicas.num_cells)
        rows_C = counts_C if rows_GE is None else replicas.columns(rows_GE).flatten()
        shared_N, why_N = _Shares(replicas, rows_C).physical(cells_TK.flatten(), turn_N)
        several_TK = which_TK < replicas.num_experts
        phy_ids_TK = torch.where(several_TK, shared_N.view_as(only_TK), only_TK)
        return Placement(phy_ids_TK, torch.where(several_TK, why_N.view_as(only_TK), ONLY))

    @staticmethod
    def reason(why: int, device: int, home: int, copies: int) -> str:
        """Say in words why a token of device `home` went to `device`, for one of `Placement.why`.

        Args:
            why: `ONLY`, `HOME`, `FULL` or `AWAY`.
            device: where the physical expert lives.
            home: the device whose attention owns the token.
            copies: of the logical expert.
        """
        if why == ONLY:
            return f"the only copy, on device {device}"
        if why == HOME:
            return f"one of {copies} copies, this one on the token's own device {device}"
        if why == FULL:
            return (
                f"one of {copies} copies; the one on the token's own device {home} had its share "
                f"of rows, so device {device}"
            )
        return f"none of {copies} copies on device {home}; spread to device {device}"


class _Replicas:
    """What a table says of one layer, as tensors.

    H experts have replicas; they are the first H columns, the others share a last one that is
    counted and not used. C = G·(H + 1) cells of a device and a column.
    """

    def __init__(self, table: RoutingTable, layer: int, device: torch.device) -> None:
        log2phy_ER = torch.tensor(table.log2phy[layer])
        # Not num_replicas: a drill may tear the two apart.
        experts_H = ((log2phy_ER >= 0).sum(1) > 1).nonzero().flatten()
        self.num_experts, self.num_columns = len(experts_H), len(experts_H) + 1
        self.num_cells = table.num_devices * self.num_columns
        index_E = torch.full((table.num_experts,), self.num_experts)
        index_E[experts_H] = columns_H = torch.arange(self.num_experts)

        log2phy_HR = log2phy_ER[experts_H]
        there_HR = log2phy_HR >= 0
        rank_HR = torch.tensor(table.rank_of_phy)[log2phy_HR].masked_fill(~there_HR, -1)
        twins_HRR = (rank_HR.unsqueeze(2) == rank_HR.unsqueeze(1)).tril(-1)
        at_home_HR = there_HR & ~twins_HRR.any(2)  # of two on a device, the first is its home
        cell_HR = rank_HR.clamp(min=0) * self.num_columns + columns_H.unsqueeze(1)
        own_C = torch.full((self.num_cells,), -1)
        own_C[cell_HR[at_home_HR]] = log2phy_HR[at_home_HR]
        self.experts_H, self.index_E = experts_H.to(device), index_E.to(device)
        self.first_E = log2phy_ER[:, 0].to(device)
        self.log2phy_HR, self.there_HR = log2phy_HR.to(device), there_HR.to(device)
        self.at_home_HR, self.cell_HR = at_home_HR.to(device), cell_HR.to(device)
        self.own_C, self.num_H1 = own_C.to(device), there_HR.sum(1, keepdim=True).to(device)
        self.turn_H1 = (experts_H + layer).unsqueeze(1).to(device)

    def columns(self, rows_GE: Tensor) -> Tensor:
        """Return (G, H + 1) the rows of the experts with replicas."""
        return torch.nn.functional.pad(rows_GE[:, self.experts_H], (0, 1))


class _Shares:
    """What each replica takes of one step's rows, and from whom; all in whole rows."""

    def __init__(self, replicas: _Replicas, rows_C: Tensor) -> None:
        self.replicas = replicas
        rows_GC = rows_C.view(-1, replicas.num_columns)
        home_rows_HR = rows_C[replicas.cell_HR] * replicas.at_home_HR
        share_H1 = -(-rows_GC.sum(0)[:-1].unsqueeze(1) // replicas.num_H1)
        kept_HR = torch.minimum(home_rows_HR, -(-share_H1 // TILE_ROWS) * TILE_ROWS)
        self.kept_C = torch.zeros_like(rows_C).index_add_(
            0, replicas.cell_HR.flatten(), kept_HR.flatten()
        )
        # All rows that leave home in one line, by expert and then device; so is the room for them.
        away_CG = (rows_GC - self.kept_C.view_as(rows_GC)).T
        before_CG = away_CG.flatten().cumsum(0).view_as(away_CG) - away_CG
        self.before_C = before_CG.T.flatten()
        room_HR = (share_H1 - kept_HR).clamp(min=0) * replicas.there_HR
        away_H1 = away_CG[:-1].sum(1, keepdim=True)
        edges_HR = _dealt(room_HR, away_H1, replicas.turn_H1)
        self.room_until = (edges_HR + away_H1.cumsum(0) - away_H1).flatten()

    def physical(self, cells_N: Tensor, turn_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return (N,) the physical expert of each row, the `turn`-th of its cell, and why."""
        kept_N = self.kept_C[cells_N]
        place_N = self.before_C[cells_N] + turn_N - kept_N
        replica_N = torch.searchsorted(self.room_until, place_N, right=True)
        away_N = self.replicas.log2phy_HR.flatten()[replica_N.clamp(max=len(self.room_until) - 1)]
        own_N, stays_N = self.replicas.own_C[cells_N], turn_N < kept_N
        why_N = torch.where(own_N >= 0, FULL, AWAY).masked_fill(stays_N, HOME)
        return torch.where(stays_N, own_N, away_N), why_N


def _dealt(room_HR: Tensor, rows_H1: Tensor, turn_H1: Tensor) -> Tensor:
    """Return (H, R) up to which of its rows each replica takes, in proportion to its room.

    Rounding goes round with `turn`, or single rows would always go to the same replica. 3 rows
    and room ``[2, 0, 2]`` at turn 0: ``[1, 1, 3]``, so 1, 0 and 2 rows; at turn 2: 2, 0 and 1.
    """
    until_HR = room_HR.cumsum(1)
    total_H1 = until_HR[:, -1:].clamp(min=1)
    return (until_HR * rows_H1 + turn_H1 % total_H1) // total_H1


def _count(cells_N: Tensor, num_cells: int) -> tuple[Tensor, Tensor]:
    """Return how many rows each cell has, and for each row how many of its cell come before it.

    Cells ``[2, 0, 2, 2]`` of 3: counts ``[1, 0, 3]`` and turns ``[0, 0, 1, 2]``.
    """
    ones_N = torch.ones_like(cells_N)
    counts = torch.zeros(num_cells, dtype=torch.int64, device=cells_N.device)
    counts.index_add_(0, cells_N, ones_N)
    order_N = cells_N.argsort(stable=True)
    starts = counts.cumsum(0) - counts
    turn_N = torch.empty_like(cells_N)
    turn_N[order_N] = ones_N.cumsum(0) - 1 - starts[cells_N[order_N]]
    return counts, turn_N
