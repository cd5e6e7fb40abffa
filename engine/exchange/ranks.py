"""Dispatch and combine between ranks: rows to the ranks that hold their experts, and back.

Every rank joins every exchange, also with no rows. Per layer and part of a batch there are three:
how many rows are coming (small, so the time it takes is the wait for the slowest rank), the rows,
and the results. The modes differ in what one message carries:

    naive       one (token, expert) pair: O(tokens · K) messages
    request     one request's rows for one peer: O(requests · ranks)
    grouped     all rows for one peer: O(ranks)
    overlapped  grouped, the batch in two halves, one under way while the other computes

Results are the same bits in every mode; `naive` and `request` are baselines to measure against.
Built and bound to a group by `engine.cluster.worker`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from engine.config import EXCHANGES, one_of
from engine.errors import RoutingError
from engine.exchange.books import Exchanged, FlightLog
from engine.exchange.dispatch import Order
from engine.exchange.group import Arrival, Group
from engine.exchange.shares import Shares, by_expert, parts_of, shares_of, split
from engine.faults import Faults
from engine.kernels.registry import Ops
from engine.routing.table import RoutingTable

Mark = Callable[[str], None]
"""Counts the time since the last mark as spent in a stage, see `StageClock`."""


def _no_clock(stage: str) -> None:
    """Take no time of stages."""


@dataclass(frozen=True, slots=True)
class RankHandle:
    """What combine needs to bring the rows of one dispatch home."""

    table_version: int
    row_of_N: Tensor
    """(N,) row of each (token, slot) pair among the rows sent."""
    counts: list[int]
    """Rows of each physical expert this rank holds."""
    experts: list[int]
    """The slot of each: its place among the weights this rank holds."""
    order_R: Tensor
    """(R,) the received rows by expert, then by source."""
    sent: list[int]
    """Rows to each member."""
    received: list[int]
    """Rows from each member."""
    layer: int
    part: int


@dataclass(slots=True)
class RankFlight:
    """Rows under way to their experts."""

    _dispatcher: RankDispatcher
    _arrival: Arrival
    _handle: RankHandle
    _log: FlightLog | None
    part: slice
    """The rows of the batch it stands for."""

    def arrive(self) -> tuple[Tensor, RankHandle]:
        """Wait for the rows; return them ordered by expert, with the handle for `combine`."""
        return self.wait().index_select(0, self._handle.order_R), self._handle

    def wait(self) -> Tensor:
        """Wait for the rows, ordered by source; waiting again costs nothing."""
        return self._dispatcher.receive(self._arrival, self._log)


@dataclass(slots=True)
class RankReturn:
    """Results under way home."""

    _dispatcher: RankDispatcher
    _arrival: Arrival
    _log: FlightLog | None
    _weights_TK: Tensor
    _row_of_N: Tensor

    def arrive(self) -> Tensor:
        """Wait for the results; return each token's weighted sum, (T, D)."""
        dispatcher = self._dispatcher
        out_SD = dispatcher.receive(self._arrival, self._log)
        dispatcher.mark("transfer")
        y_TD: Tensor = dispatcher.ops.combine(out_SD, self._weights_TK, self._row_of_N)
        dispatcher.mark("combine")
        return y_TD


@dataclass
class RankDispatcher:
    """Moves rows between the ranks of one group."""

    ops: Ops
    faults: Faults
    exchanged: Exchanged = field(init=False)
    """The books of the step."""
    collectives: int = 0
    """How many this rank has joined so far; all ranks of a group must have joined as many."""
    mark: Mark = field(default_factory=lambda: _no_clock, init=False)
    """The step's clock."""
    log: list[FlightLog] | None = field(default=None, init=False)
    """What was under way in the step; None when nobody wants to know."""
    order: Order = field(init=False)
    """Of the rows by expert."""
    _parts: tuple[slice, ...] = (slice(None),)
    _mode: str = "grouped"
    _shares: Shares | None = None
    _group: Group | None = None

    def __post_init__(self) -> None:
        self.order = Order(self.ops)

    @property
    def group(self) -> Group:
        """The group of this epoch; between two epochs there is none and nothing is exchanged."""
        assert self._group is not None, "this rank has not joined a group"
        return self._group

    def join(self, group: Group | None) -> None:
        """Exchange in another group from now on, or in none; the last one is left at once."""
        if self._group is not None:
            self._group.close()
        self._group, self._shares = group, None

    def begin(
        self,
        mode: str,
        lengths: Sequence[int],
        num_rounds: int,
        table: RoutingTable,
        *,
        keep: bool = False,
    ) -> None:
        """Prepare a step; every rank must get the same mode and number of rounds.

        Args:
            mode: one of `engine.config.EXCHANGES`.
            lengths: rows of each request this rank runs in the step.
            num_rounds: most requests on any rank; only `request` uses it.
            table: the step's table.
            keep: whether to log what is under way.

        Raises:
            ConfigError: no such mode.
        """
        one_of("exchange", mode, EXCHANGES)
        self._parts = parts_of(mode, lengths, num_rounds)
        self._mode = mode
        self.log = [] if keep else None
        self.exchanged = Exchanged.none(table.num_devices)
        if self._shares is None or self._shares.table is not table:
            shares = shares_of(table, self.group.members, self.group.me)
            position_of_phy = shares.position_of_phy.to(self.group.device)
            self._shares = replace(shares, position_of_phy=position_of_phy)

    def dispatch(
        self, x_TD: Tensor, phy_ids_TK: Tensor, table: RoutingTable, layer: int, mark: Mark
    ) -> list[RankFlight]:
        """Send each token to the ranks of its experts.

        Waits for the counts of all ranks; the rows are under way when it returns. Mode `request`
        waits for the rows of one request before it counts the next one's.

        Args:
            x_TD: (T, D) hidden states of this rank's tokens; T may be 0.
            phy_ids_TK: (T, K) int64 physical experts, -1 for none.
            table: the table the ids came from.
            layer: index among the MoE layers.
            mark: the step's clock.

        Raises:
            ExchangeError: a rank died or did not answer in time.
        """
        flights, self.mark = [], mark
        for number, part in enumerate(self._parts):
            flights.append(self._dispatch(number, part, x_TD[part], phy_ids_TK[part], table, layer))
            if self._mode == "request":
                flights[-1].wait()
                mark("transfer")
        return flights

    def _dispatch(
        self,
        number: int,
        part: slice,
        x_TD: Tensor,
        phy_ids_TK: Tensor,
        table: RoutingTable,
        layer: int,
    ) -> RankFlight:
        """Send one part of the batch."""
        shares = self._shares
        assert shares is not None and shares.table is table, "`begin` was not told of this table"
        positions_TK = shares.position_of_phy[phy_ids_TK].where(phy_ids_TK >= 0, -1)
        source_R, row_of_N, counts = self.order.by_expert(positions_TK, table.num_physical)
        self.mark("sort")
        counts_GS = self.exchange_counts(counts, shares, layer)
        self.mark("wait")
        sent = [sum(part) for part in split(counts, shares.slots)]
        received = counts_GS.sum(1).tolist()
        handle = RankHandle(
            table.version,
            row_of_N,
            counts_GS.sum(0).tolist(),
            list(range(len(shares.mine))),
            by_expert(counts_GS).to(x_TD.device),
            sent,
            received,
            layer,
            number,
        )
        rows_SD = x_TD.index_select(0, source_R)
        if (fault := self.faults.dispatch_send) is not None:
            rows_SD = fault(rows_SD)
        arrival, log = self._send(rows_SD, sent, received, handle, results=False)
        for member, count in zip(self.group.members, sent, strict=True):
            self.exchanged.rows_G[member] += count
        self.mark("dispatch")
        return RankFlight(self, arrival, handle, log, part)

    def combine(
        self, out_RD: Tensor, topk_weights_TK: Tensor, handle: RankHandle, table: RoutingTable
    ) -> RankReturn:
        """Send results home; their weighted sums come with `arrive`.

        Raises:
            RoutingError: `handle` was made under another table version.
            ExchangeError: a rank died or did not answer in time.
        """
        if handle.table_version != table.version:
            raise RoutingError(
                f"rows were dispatched under table version {handle.table_version} but combine sees "
                f"version {table.version}; publish tables between steps only."
            )
        back_RD = torch.empty_like(out_RD)
        back_RD[handle.order_R] = out_RD
        arrival, log = self._send(back_RD, handle.received, handle.sent, handle, results=True)
        self.mark("combine")
        if self._mode == "request":
            self.receive(arrival, log)
            self.mark("transfer")
        return RankReturn(self, arrival, log, topk_weights_TK, handle.row_of_N)

    def receive(self, arrival: Arrival, log: FlightLog | None) -> Tensor:
        """Wait for what is under way; waiting again costs nothing."""
        rows = arrival.wait()
        self.exchanged.transfer_s += arrival.take_wait_s()
        if log is not None and not log.arrived_ns:
            log.arrived_ns = time.perf_counter_ns()
        return rows

    def exchange_counts(self, counts: list[int], shares: Shares, layer: int) -> Tensor:
        """Return (G, S): rows each member sends to each of this rank's S experts."""
        size, num_mine = self.group.size, len(shares.mine)
        self.collectives += 1
        arrival = self.group.all_to_all(
            torch.tensor(counts, dtype=torch.int64, device=self.group.device),
            shares.slots,
            [num_mine] * size,
            f"counts of layer {layer}",
        )
        counts_GS = arrival.wait().view(size, num_mine).cpu()  # the host decides by them
        self.exchanged.wait_s += arrival.take_wait_s()
        for member, slots in zip(self.group.members, shares.slots, strict=True):
            self._book(member, 1, slots * 8)
        return counts_GS

    def _send(
        self,
        rows: Tensor,
        sent: list[int],
        received: list[int],
        handle: RankHandle,
        *,
        results: bool,
    ) -> tuple[Arrival, FlightLog | None]:
        width = rows.shape[1] * rows.element_size()
        for member, count in zip(self.group.members, sent, strict=True):
            self._book(member, count if self._mode == "naive" else min(count, 1), count * width)
        self.collectives += 1
        move = self.group.send_each if self._mode == "naive" else self.group.all_to_all
        log = self._log(sent, handle, results) if self.log is not None else None
        what = f"{'combine' if results else 'dispatch'} of layer {handle.layer}"
        return move(rows, sent, received, what), log

    def _log(self, sent: list[int], handle: RankHandle, results: bool) -> FlightLog:
        assert self.log is not None, "nobody wants to know"
        rows_G = np.zeros(len(self.exchanged.rows_G), np.int64)
        rows_G[list(self.group.members)] = sent
        now = time.perf_counter_ns()
        self.log.append(FlightLog(handle.layer, handle.part, results, rows_G, now))
        return self.log[-1]

    def _book(self, member: int, messages: int, num_bytes: int) -> None:
        if member != self.group.me:
            self.exchanged.messages_G[member] += messages
            self.exchanged.bytes_G[member] += num_bytes
