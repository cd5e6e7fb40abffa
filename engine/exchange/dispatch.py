"""Dispatch and combine: rows to their experts, and back.

`LocalDispatcher` serves logical devices: one process, the same permutations as between real ones,
nothing sent. A dispatcher hands out a handle with each dispatch and takes it back with combine; a
handle of another table version is refused, because its rows lie where the old table said.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from torch import Tensor

from engine.errors import RoutingError
from engine.faults import Faults
from engine.kernels.permute import Permutation
from engine.kernels.registry import Ops
from engine.routing.cache import LookUps
from engine.routing.table import Int, RoutingTable

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class DispatchHandle:
    """What combine needs to bring the rows of one dispatch home."""

    table_version: int
    row_of_N: Tensor
    """(T·K,) row of each (token, slot) pair."""
    counts: list[int]
    """(P,) rows of each physical expert."""
    experts: list[int]
    """(P,) the logical expert each physical one holds."""


@dataclass(frozen=True, slots=True)
class Landed(Generic[V]):
    """What never left this process: it has arrived as soon as it was sent."""

    value: V
    part: slice = field(default_factory=lambda: slice(None))
    """The rows of the batch it stands for."""

    def arrive(self) -> V:
        """Return it."""
        return self.value


class Dispatcher(Protocol):
    """What an MoE layer asks of whoever moves its rows; see `LocalDispatcher` for the arguments.

    A flight, and what `combine` returns, is waited for by `arrive`.
    """

    @property
    def order(self) -> Order:
        """How rows are put in order."""

    def dispatch(
        self,
        x_TD: Tensor,
        phy_ids_TK: Tensor,
        table: RoutingTable,
        layer: int,
        mark: Callable[[str], None],
    ) -> Any:
        """Start the flights of all T rows; a list, each with the `part` of them it carries."""

    def combine(
        self, out_RD: Tensor, topk_weights_TK: Tensor, handle: Any, table: RoutingTable
    ) -> Any:
        """Bring one flight's results home and add them up, weighted."""


class Order:
    """The order of rows by expert, looked up where the same few ids come again.

    It depends on the ids alone, so one table serves all layers.
    """

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        self.look_ups: LookUps[Permutation] = LookUps()
        self.found = False
        """Whether the last order was looked up."""
        self._num_physical = 0

    def by_expert(self, phy_ids_TK: Tensor, num_physical: int) -> Permutation:
        """Do what `engine.kernels.permute.permute` does."""
        if num_physical != self._num_physical:
            self.look_ups.forget()
            self._num_physical = num_physical
        key = self.look_ups.key(phy_ids_TK)
        order = None if key is None else self.look_ups.get(key)
        self.found = order is not None
        if order is None:
            made: Permutation = self.ops.permute(phy_ids_TK, num_physical)
            if key is not None:
                self.look_ups.keep(key, made)
            return made
        return order


class LocalDispatcher:
    """Moves rows inside one process; nothing is sent and nothing overlaps."""

    def __init__(self, ops: Ops, faults: Faults) -> None:
        self.ops, self.faults = ops, faults
        self.order = Order(ops)

    def dispatch(
        self,
        x_TD: Tensor,
        phy_ids_TK: Tensor,
        table: RoutingTable,
        layer: int,
        mark: Callable[[str], None],
    ) -> list[Landed[tuple[Tensor, DispatchHandle]]]:
        """Order (token, slot) pairs by physical expert.

        Args:
            x_TD: (T, D) hidden states; T may be 0.
            phy_ids_TK: (T, K) int64 physical experts, -1 for none.
            table: the table the ids came from.
            layer: index among the MoE layers.
            mark: the step's clock.

        Returns:
            one flight, which brings rows (R, D) ordered by physical expert, and the handle for
            `combine`.
        """
        source_R, row_of_N, counts = self.order.by_expert(phy_ids_TK, table.num_physical)
        mark("sort")
        rows_RD = x_TD.index_select(0, source_R)
        if (fault := self.faults.dispatch_send) is not None:
            rows_RD = fault(rows_RD)
        mark("dispatch")
        handle = DispatchHandle(table.version, row_of_N, counts, table.experts_of(layer))
        return [Landed((rows_RD, handle))]

    def combine(
        self, out_RD: Tensor, topk_weights_TK: Tensor, handle: DispatchHandle, table: RoutingTable
    ) -> Landed[Tensor]:
        """Sum each token's weighted expert outputs in the order of its slots; (T, D) on arrival.

        Raises:
            RoutingError: `handle` was made under another table version.
        """
        if handle.table_version != table.version:
            raise RoutingError(
                f"rows were dispatched under table version {handle.table_version} but combine sees "
                f"version {table.version}; publish tables between steps only."
            )
        y_TD: Tensor = self.ops.combine(out_RD, topk_weights_TK, handle.row_of_N)
        return Landed(y_TD)


def traffic(homes_T: Int, phy_ids_TK: Int, table: RoutingTable) -> Int:
    """Count rows by source and destination device: (G, G), the diagonal stays at home.

    Tokens with homes ``[0, 1]`` and physical experts ``[[0, 3], [2, -1]]``, where experts 0 and 1
    live on device 0 and 2 and 3 on device 1, give ``[[1, 1], [0, 1]]``.
    """
    devices = np.where(phy_ids_TK >= 0, table.rank_of_phy[phy_ids_TK], -1)
    pairs = homes_T[:, None] * table.num_devices + devices
    flat = np.bincount(pairs[devices >= 0], minlength=table.num_devices**2)
    return flat.reshape(table.num_devices, table.num_devices)
