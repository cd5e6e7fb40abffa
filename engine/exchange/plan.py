"""Plans for moving experts: from the load that was measured and the table in force to the next.

A plan is worked out before anything moves. It says what it gains, what it costs and when it has
paid for itself, and refuses in words when it does not pay. Pure: the caller stages the moves and
publishes the table. Called by the controller between steps.

It pays when ``transfer_us / saved_us_per_step``, rounded up, is at most `horizon_steps`, where
``saved_us_per_step = experts_us_per_step * gain``. The transfer counts in full, as if nothing ran
beside it. A rank that holds experts and has to give them up makes any plan pay. A gain of 0.25 on
2,000 us of experts a step saves 500 us; 8,000 us of transfer are paid back after 16 steps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.errors import RoutingError
from engine.exchange.topology import Counts, Topology
from engine.routing.balance import Load, balanced, imbalance, rank_rows
from engine.routing.placement import filled
from engine.routing.table import RoutingTable


@dataclass(frozen=True, slots=True, order=True)
class Move:
    """One expert that a rank gets and did not hold; all of its state travels together."""

    layer: int
    expert: int
    source: int
    """The rank that sends it; -1 when no rank has it left: from a host copy or the checkpoint."""
    target: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The next table, and what it is worth."""

    table: RoutingTable
    moves: tuple[Move, ...]
    imbalance_before: float
    """Max/mean load by `engine.routing.balance.IMBALANCE_FORMULA`."""
    imbalance_after: float
    gain: float
    """1 - the busiest ranks' rows after / before, summed over layers: the share of the experts'
    time that is saved, as a step waits in each layer for its busiest rank."""
    moved_bytes: int
    bytes_per_rank: tuple[int, ...]
    """(G,) that the experts of the next table take on each rank."""
    replica_bytes: int
    """Of that, over all ranks, for copies beyond the first."""
    transfer_us: float
    """All moves at once over the topology's links; what comes from no rank is not in it."""
    saved_us_per_step: float
    payback_steps: float
    """Steps until the saving has paid the transfer; infinite when nothing is saved."""
    pays: bool
    reason: str
    """Why it pays or not, with the numbers; for people."""

    def accepted(self) -> RoutingTable:
        """Return the next table.

        Raises:
            RoutingError: the plan does not pay.
        """
        if not self.pays:
            raise RoutingError(f"the plan is refused: {self.reason}; keep the table in force.")
        return self.table


def plan(
    load_LE: Load,
    now: RoutingTable,
    topology: Topology,
    *,
    expert_bytes: int,
    experts_us_per_step: float,
    num_slots: int | None = None,
    num_groups: int = 1,
    horizon_steps: int = 1000,
    leaving: Collection[int] = (),
    lost: Collection[int] = (),
) -> Plan:
    """Plan the next table for a load, and judge whether moving to it pays.

    A layer whose busiest rank would get no fewer rows stays as it is.

    Args:
        load_LE: (L, E) rows of each expert, counted in a recent window or averaged.
        now: the table in force, of G ranks.
        topology: G ranks, or more: the first G are meant.
        expert_bytes: all state of one expert of one layer: weights, scales, statistics.
        experts_us_per_step: how long a step waits for its experts under `now`, over all layers;
            measured, or modelled by the topology's roofline.
        num_slots: P, as `balanced`.
        num_groups: as `balanced`.
        horizon_steps: for how long the load is trusted to stay as it is.
        leaving: ranks that get no expert in the next table and still can send theirs.
        lost: ranks that get none and can send nothing.

    Raises:
        RoutingError: the slots or groups do not fit, or no rank is left.
        ConfigError: the topology has fewer ranks than the table.
    """
    topology = topology.for_ranks(now.num_devices)
    gone = {*leaving, *lost}
    table = _next(load_LE, now, topology, gone, num_slots, num_groups)
    moves = moves_between(now, table, topology, lost)
    gain = _gain(load_LE, now, table)
    saved = experts_us_per_step * gain
    transfer_us = topology.all_to_all(*_traffic(moves, expert_bytes, topology)).us
    payback = math.ceil(transfer_us / saved) if saved > 0 else math.inf
    must = sorted(gone & set(now.rank_of_phy.tolist()))
    pays, reason = _verdict(len(moves), gain, payback, horizon_steps, must)
    bytes_per_rank, replica_bytes = _memory(table, expert_bytes)
    return Plan(
        table=table,
        moves=moves,
        imbalance_before=imbalance(load_LE, now),
        imbalance_after=imbalance(load_LE, table),
        gain=gain,
        moved_bytes=len(moves) * expert_bytes,
        bytes_per_rank=bytes_per_rank,
        replica_bytes=replica_bytes,
        transfer_us=transfer_us,
        saved_us_per_step=saved,
        payback_steps=payback,
        pays=pays,
        reason=reason,
    )


def moves_between(
    now: RoutingTable,
    new: RoutingTable,
    topology: Topology | None = None,
    lost: Collection[int] = (),
) -> tuple[Move, ...]:
    """Return what has to travel from one table to the next, in order of layer and expert.

    An expert comes from a rank of the target's node if one holds it, and among those from the one
    that has sent least so far. A copy that stays on its rank moves nothing. Without a topology all
    ranks are on one node.

    From ``[[0, 1]]`` to ``[[0, 0]]`` on 2 ranks: expert 0 of layer 0 goes from rank 0 to rank 1.
    """
    node_of = topology.node_of_rank if topology else [0] * now.num_devices
    sent: Counter[int] = Counter()
    moves = []
    for layer in range(new.num_layers):
        for expert in range(new.num_experts):
            held, wanted = (_ranks_with(table, layer, expert) for table in (now, new))
            senders = held - set(lost)
            for target in sorted(wanted - held):
                source = min(
                    senders,
                    key=lambda rank: (node_of[rank] != node_of[target], sent[rank], rank),
                    default=-1,
                )
                sent[source] += 1
                moves.append(Move(layer, expert, source, target))
    return tuple(moves)


def _next(
    load_LE: Load,
    now: RoutingTable,
    topology: Topology,
    gone: Collection[int],
    num_slots: int | None,
    num_groups: int,
) -> RoutingTable:
    """Return the table for a load on the ranks that stay, as like the one in force as it may be."""
    wished = balanced(
        load_LE,
        now.num_devices,
        version=now.version + 1,
        num_slots=num_slots,
        nodes=[[rank for rank in node if rank not in gone] for node in topology.nodes],
        num_groups=num_groups,
        now=now,
    )
    return _improved(load_LE, now, wished)


def _improved(load_LE: Load, now: RoutingTable, wished: RoutingTable) -> RoutingTable:
    """Leave the layers as they are in which the busiest rank would get no fewer rows."""
    if not np.array_equal(now.rank_of_phy, wished.rank_of_phy):
        return wished
    before_L, after_L = (rank_rows(load_LE, table).max(axis=1) for table in (now, wished))
    better_L = after_L < before_L * (1 - 1e-9)  # a gain of rounding errors is none
    return filled(
        np.where(better_L[:, None] | _has_twins(now)[:, None], wished.phy2log, now.phy2log),
        now.rank_of_phy,
        now.num_experts,
        now.num_devices,
        version=wished.version,
    )


def _gain(load_LE: Load, now: RoutingTable, table: RoutingTable) -> float:
    """Return `Plan.gain`; 0 without rows."""
    before, after = (float(rank_rows(load_LE, each).max(axis=1).sum()) for each in (now, table))
    return 1.0 - after / before if before else 0.0


def _memory(table: RoutingTable, expert_bytes: int) -> tuple[tuple[int, ...], int]:
    """Return (G,) the bytes of each rank's experts, and those of copies beyond the first."""
    slots_G = np.bincount(table.rank_of_phy, minlength=table.num_devices)
    stack_bytes = table.num_layers * expert_bytes
    copies = table.num_physical - table.num_experts
    return tuple((slots_G * stack_bytes).tolist()), copies * stack_bytes


def _has_twins(table: RoutingTable) -> npt.NDArray[np.bool_]:
    """Return (L,) whether a rank has two copies of an expert: tables made by hand may."""
    ranked_LP = table.rank_of_phy * (table.num_experts + 1) + table.phy2log
    return np.array([len(set(row.tolist())) < len(row) for row in ranked_LP], dtype=bool)


def _ranks_with(table: RoutingTable, layer: int, expert: int) -> set[int]:
    slots = table.log2phy[layer, expert, : table.num_replicas[layer, expert]]
    return set(table.rank_of_phy[slots].tolist())


def _traffic(
    moves: tuple[Move, ...], expert_bytes: int, topology: Topology
) -> tuple[Counts, Counts]:
    """Return (G, G) bytes and messages: one message for each expert that a rank sends."""
    messages_GG = np.zeros((topology.num_ranks, topology.num_ranks), dtype=np.int64)
    for move in moves:
        if move.source >= 0:
            messages_GG[move.source, move.target] += 1
    return messages_GG * expert_bytes, messages_GG


def _verdict(
    num_moves: int, gain: float, payback: float, horizon_steps: int, must: list[int]
) -> tuple[bool, str]:
    if must:
        ranks = ", ".join(map(str, must))
        return True, f"rank {ranks} must give up its experts, whatever that costs"
    if not num_moves:
        return False, "it moves no expert to another rank, so it gains nothing"
    if math.isinf(payback):
        return False, f"it moves {num_moves} experts and saves no time"
    verdict = f"it saves {gain:.1%} of the experts' time and pays back after {payback:,} steps"
    if payback > horizon_steps:
        return False, f"{verdict}, later than the {horizon_steps:,} for which the load is trusted"
    return True, verdict
