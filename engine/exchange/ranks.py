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

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from engine.config import EXCHANGES, one_of
from engine.errors import RoutingError
from engine.events import Flights, Int64
from engine.exchange.dispatch import Order
from engine.exchange.group import Arrival, Group
from engine.faults import Faults
from engine.kernels.registry import Ops
from engine.routing.table import RoutingTable

Mark = Callable[[str], None]
"""Counts the time since the last mark as spent in a stage, see `StageClock`."""


def _no_clock(stage: str) -> None:
    """Take no time of stages."""


@dataclass(slots=True)
class Exchanged:
    """What one rank sent in one step, summed over layers; the receiving side is its peers'."""

    rows_G: Int64
    """(G,) rows sent to each device, the own one included."""
    bytes_G: Int64
    """(G,) bytes sent to each other device: rows out, results back, counts."""
    messages_G: Int64
    """(G,) messages sent to each other device."""
    wait_s: float = 0.0
    """Until the slowest rank had said how many rows it sends."""
    transfer_s: float = 0.0
    """Until rows and results had come, once everybody was there."""

    @classmethod
    def none(cls, num_devices: int) -> Exchanged:
        """Start a step's books."""
        rows_G, bytes_G, messages_G = (np.zeros(num_devices, dtype=np.int64) for _ in range(3))
        return cls(rows_G, bytes_G, messages_G)


@dataclass(slots=True)
class FlightLog:
    """One thing under way, as `engine.events.Flights` tells it."""

    layer: int
    part: int
    results: bool
    rows_G: Int64
    sent_ns: int
    arrived_ns: int = 0


def flights(logs: Sequence[FlightLog], num_devices: int, origin_ns: int) -> Flights:
    """Put what was under way into columns, with times since `origin_ns`."""
    times = np.array([(log.sent_ns, log.arrived_ns) for log in logs], np.int64).reshape(-1, 2)
    sent_ms, arrived_ms = ((times - origin_ns) / 1e6).astype(np.float32).T
    return Flights(
        np.array([log.layer for log in logs], np.int16),
        np.array([log.part for log in logs], np.int16),
        np.array([log.results for log in logs], np.uint8),
        sent_ms,
        arrived_ms,
        np.array([log.rows_G for log in logs], np.int32).reshape(-1, num_devices),
    )


@dataclass(frozen=True, slots=True)
class Shares:
    """Who holds what under one table, seen by one rank."""

    table: RoutingTable
    position_of_phy: Tensor
    """(P,) int64: physical experts counted rank by rank."""
    slots: list[int]
    """Physical experts of each member of the group, one after the other."""
    mine: list[int]
    """The physical experts of this rank."""


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
        self._parts = _parts(mode, lengths, num_rounds)
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
        sent = [sum(part) for part in _split(counts, shares.slots)]
        received = counts_GS.sum(1).tolist()
        handle = RankHandle(
            table.version,
            row_of_N,
            counts_GS.sum(0).tolist(),
            list(range(len(shares.mine))),
            _by_expert(counts_GS).to(x_TD.device),
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


def shares_of(table: RoutingTable, members: Sequence[int], me: int) -> Shares:
    """Count the physical experts rank by rank.

    Owners ``[1, 0, 1]`` give positions ``[1, 0, 2]`` and one slot on rank 0, two on rank 1.

    Raises:
        RoutingError: the table puts an expert on a device that is not a member.
    """
    owners = table.rank_of_phy
    if strangers := sorted(set(owners.tolist()) - set(members)):
        raise RoutingError(
            f"table version {table.version} puts experts on rank {strangers[0]}, but the group has "
            f"ranks {list(members)}; publish a table for these."
        )
    order = np.argsort(owners, kind="stable")
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    return Shares(
        table,
        torch.from_numpy(position),
        [int((owners == member).sum()) for member in members],
        np.flatnonzero(owners == me).tolist(),
    )


def _parts(mode: str, lengths: Sequence[int], num_rounds: int) -> tuple[slice, ...]:
    """Cut a batch: three requests of 2, 1, 1 rows overlapped give rows 0-1 and 2-3."""
    total = sum(lengths)
    if mode == "overlapped":
        return slice(0, (total + 1) // 2), slice((total + 1) // 2, total)
    if mode == "request":
        ends = [0, *itertools.accumulate(lengths)]
        ends += [total] * (max(1, num_rounds) + 1 - len(ends))
        return tuple(slice(start, end) for start, end in itertools.pairwise(ends))
    return (slice(None),)


def _split(counts: list[int], slots: list[int]) -> list[list[int]]:
    ends = [0, *itertools.accumulate(slots)]
    return [counts[start:end] for start, end in itertools.pairwise(ends)]


def _by_expert(counts_GS: Tensor) -> Tensor:
    """Order rows that came by source, then expert, by expert, then source.

    Counts ``[[1, 1], [1, 0]]``: source 0 sent rows 0 (expert 0) and 1 (expert 1), source 1 row 2
    (expert 0); the order is ``[0, 2, 1]``.
    """
    experts_GS = torch.arange(counts_GS.shape[1]).expand(counts_GS.shape)
    of_row_R = torch.repeat_interleave(experts_GS.reshape(-1), counts_GS.reshape(-1))
    return torch.argsort(of_row_R, stable=True)
