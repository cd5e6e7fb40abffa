"""Level 4: which replica of an expert runs a token, hence which device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.routing.cache import LookUps
from engine.routing.device_rows import AWAY, FULL, HOME, ONLY, REASON_BITS, TILE_ROWS, FewRows
from engine.routing.table import Int, RoutingTable


class Placement:
    """Where the rows of one layer went, and why; read by the record of decisions."""

    __slots__ = ("_why", "phy_ids_TK")

    def __init__(self, phy_ids_TK: Tensor, why: Int | None) -> None:
        """Keep (T, K) physical experts and the reasons, an array of as many numbers."""
        self.phy_ids_TK, self._why = phy_ids_TK, why

    @property
    def why_TK(self) -> Tensor | None:
        """(T, K) int64 `ONLY`, `HOME`, `FULL` or `AWAY`; None where no expert has replicas."""
        if self._why is None:
            return None
        why_TK = (self._why & (1 << REASON_BITS) - 1).reshape(self.phy_ids_TK.shape)
        return _tensor(why_TK, self.phy_ids_TK)


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
            self._few = FewRows(table, layer)
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

    def _work_out(self, topk_ids_TK: Tensor, homes: Tensor, rows_GE: Tensor | None) -> Placement:
        """Place a step's rows, on the host: numpy's operations on a few ids cost a fifth."""
        replicas = self._replicas
        if not replicas.num_experts:
            return Placement(replicas.first[topk_ids_TK], None)
        ids_TK, homes_T = topk_ids_TK.cpu().numpy(), homes.cpu().numpy()
        rows = None if rows_GE is None else rows_GE.cpu().numpy()
        if self._few.suits(ids_TK.size):
            codes_N = self._few.place(ids_TK, homes_T, rows)
            phy_ids_TK = (codes_N >> REASON_BITS).reshape(ids_TK.shape)
            return Placement(_tensor(phy_ids_TK, topk_ids_TK), codes_N)
        which_TK = replicas.index_E[ids_TK]
        cells_N = (homes_T[:, None] * replicas.num_columns + which_TK).ravel()
        counts_C, turn_N = _count(cells_N, replicas.num_cells)
        rows_C = counts_C if rows is None else replicas.columns(rows).ravel()
        shared_N, why_N = _Shares(replicas, rows_C).physical(cells_N, turn_N)
        several_TK, shape = which_TK < replicas.num_experts, ids_TK.shape
        phy_ids_TK = np.where(several_TK, shared_N.reshape(shape), replicas.first_E[ids_TK])
        why_TK = np.where(several_TK, why_N.reshape(shape), ONLY)
        return Placement(_tensor(phy_ids_TK, topk_ids_TK), why_TK)

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


def _tensor(values: Int, like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)


class _Replicas:
    """What a table says of one layer.

    H experts have replicas; they are the first H columns, the others share a last one that is
    counted and not used. C = G·(H + 1) cells of a device and a column.
    """

    def __init__(self, table: RoutingTable, layer: int, device: torch.device) -> None:
        log2phy_ER = table.log2phy[layer]
        self.first_E = log2phy_ER[:, 0]
        self.first = torch.tensor(self.first_E, device=device)
        # Not num_replicas: a drill may tear the two apart.
        self.experts_H = experts_H = np.flatnonzero((log2phy_ER >= 0).sum(1) > 1)
        self.num_experts, self.num_columns = len(experts_H), len(experts_H) + 1
        self.num_cells = table.num_devices * self.num_columns
        self.index_E = np.full(table.num_experts, self.num_experts)
        columns_H = np.arange(self.num_experts)
        self.index_E[experts_H] = columns_H

        self.log2phy_HR = log2phy_HR = log2phy_ER[experts_H]
        self.there_HR = there_HR = log2phy_HR >= 0
        rank_HR = np.where(there_HR, table.rank_of_phy[log2phy_HR], -1)
        twins_HRR = np.tril(rank_HR[:, :, None] == rank_HR[:, None, :], -1)
        self.at_home_HR = there_HR & ~twins_HRR.any(2)  # of two on a device, the first is its home
        self.cell_HR = np.maximum(rank_HR, 0) * self.num_columns + columns_H[:, None]
        self.own_C = np.full(self.num_cells, -1)
        self.home_C, self.homes = self.cell_HR[self.at_home_HR], np.flatnonzero(self.at_home_HR)
        self.own_C[self.home_C] = log2phy_HR[self.at_home_HR]
        self.num_H1 = there_HR.sum(1, keepdims=True)
        self.turn_H1 = (experts_H + layer)[:, None]

    def columns(self, rows_GE: Int) -> Int:
        """Return (G, H + 1) the rows of the experts with replicas."""
        return np.pad(rows_GE[:, self.experts_H], ((0, 0), (0, 1)))


class _Shares:
    """What each replica takes of one step's rows, and from whom; all in whole rows."""

    def __init__(self, replicas: _Replicas, rows_C: Int) -> None:
        self.replicas = replicas
        rows_GC = rows_C.reshape(-1, replicas.num_columns)
        home_rows_HR = rows_C[replicas.cell_HR] * replicas.at_home_HR
        share_H1 = -(-rows_GC.sum(0)[:-1, None] // replicas.num_H1)
        kept_HR = np.minimum(home_rows_HR, -(-share_H1 // TILE_ROWS) * TILE_ROWS)
        self.kept_C = np.zeros_like(rows_C)
        self.kept_C[replicas.home_C] = kept_HR.ravel()[replicas.homes]
        # All rows that leave home in one line, by expert and then device; so is the room for them.
        away_CG = (rows_GC - self.kept_C.reshape(rows_GC.shape)).T
        before_CG = away_CG.cumsum().reshape(away_CG.shape) - away_CG
        self.before_C = before_CG.T.ravel()
        room_HR = np.maximum(share_H1 - kept_HR, 0) * replicas.there_HR
        away_H1 = away_CG[:-1].sum(1, keepdims=True)
        edges_HR = _dealt(room_HR, away_H1, replicas.turn_H1)
        self.room_until = (edges_HR + away_H1.cumsum(0) - away_H1).ravel()

    def physical(self, cells_N: Int, turn_N: Int) -> tuple[Int, Int]:
        """Return (N,) the physical expert of each row, the `turn`-th of its cell, and why."""
        kept_N = self.kept_C[cells_N]
        place_N = self.before_C[cells_N] + turn_N - kept_N
        replica_N = np.searchsorted(self.room_until, place_N, side="right")
        away_N = self.replicas.log2phy_HR.ravel()[np.minimum(replica_N, len(self.room_until) - 1)]
        own_N, stays_N = self.replicas.own_C[cells_N], turn_N < kept_N
        why_N = np.where(stays_N, HOME, np.where(own_N >= 0, FULL, AWAY))
        return np.where(stays_N, own_N, away_N), why_N


def _dealt(room_HR: Int, rows_H1: Int, turn_H1: Int) -> Int:
    """Return (H, R) up to which of its rows each replica takes, in proportion to its room.

    Rounding goes round with `turn`, or single rows would always go to the same replica. 3 rows
    and room ``[2, 0, 2]`` at turn 0: ``[1, 1, 3]``, so 1, 0 and 2 rows; at turn 2: 2, 0 and 1.
    """
    until_HR = room_HR.cumsum(1)
    total_H1 = np.maximum(until_HR[:, -1:], 1)
    dealt: Int = (until_HR * rows_H1 + turn_H1 % total_H1) // total_H1
    return dealt


def _count(cells_N: Int, num_cells: int) -> tuple[Int, Int]:
    """Return how many rows each cell has, and for each row how many of its cell come before it.

    Cells ``[2, 0, 2, 2]`` of 3: counts ``[1, 0, 3]`` and turns ``[0, 0, 1, 2]``.
    """
    counts_C = np.bincount(cells_N, minlength=num_cells)
    order_N = cells_N.argsort(kind="stable")
    turn_N = np.empty_like(cells_N)
    turn_N[order_N] = np.arange(len(cells_N)) - (counts_C.cumsum() - counts_C)[cells_N[order_N]]
    return counts_C, turn_N


__all__ = ["AWAY", "FULL", "HOME", "ONLY", "TILE_ROWS", "Placement", "Placer"]
