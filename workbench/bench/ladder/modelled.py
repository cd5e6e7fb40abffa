"""The ladder, modelled: the routed layers of a large model on a machine on paper.

Nothing here is fitted. Machine, widths, tokens and seed are read from a file written beforehand,
the choices are the bundled model's (`frozen`), and every time follows from data-sheet figures:

    count       all-to-all of 8 bytes for each expert a peer holds, one message a peer
    out, back   all-to-all of D values a row, there and home (`engine.exchange.topology`)
    comp        the slowest rank's max(6·D·F·rows / tflops,
                (3·D·F·experts touched + 2·D·rows) · bytes a value / memory bandwidth)

    request     sum over rounds of count + out + comp + back; round i is the i-th request of every
                rank, so an expert's weights are read again in each
    naive       count + out + comp + back, with one message for each row
    grouped     count + out + comp + back, with one message for each peer
    overlapped  the ranks' rows in halves A and B, comm = count + out:
                comm(A) + max(comp(A), comm(B)) + max(comp(B), back(A)) + back(B)
    dense       comp of one expert of K·F on every rank's own rows: the products of the routed
                layer, and no communication

A step is the sum over the model's layers, which take the recorded layers in turn. Left out, on all
rungs alike: attention, the gate, sorting rows, launches, congestion. Communication is what the
step takes beyond its slowest ranks' computing, so what is hidden behind it does not count.

Overlap can lose: each half reads the experts' weights, so with few rows an expert, where reading is
all that counts, two halves take twice as long as the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from engine.exchange.topology import Topology
from engine.routing.balance import replicated
from engine.routing.device import Placer
from engine.routing.placement import contiguous
from engine.routing.table import RoutingTable
from workbench import paths
from workbench.bench.ladder.frozen import Frozen, Recorded, Shape, record
from workbench.bench.ladder.rungs import CONTROL, RUNGS, Float, Int, Rung, StepFigures, layer_rows
from workbench.bench.ladder.rungs import row as row_of

COUNT_BYTES = 8
"""Of the number of rows for one expert."""


def run(
    *, devices: int = 8, topology: str | None = None, tokens: int | None = None
) -> dict[str, Any]:
    """Model every rung and the dense control.

    Args:
        devices: ranks of the machine that are used.
        topology: a file's name in data/hardware; None takes the frozen one.
        tokens: of a step; None takes the frozen number.

    Raises:
        ConfigError: no such topology, it has fewer ranks, or a number is below 1.
    """
    frozen = Frozen.read(paths.data("hardware", "ladder", "frozen.json"))
    frozen = replace(frozen, tokens=frozen.tokens if tokens is None else tokens)
    name = topology or frozen.topology
    machine = Topology.read(paths.root() / "data" / "hardware" / f"{name}.json")
    return report(machine.for_ranks(devices), frozen)


def report(machine: Topology, frozen: Frozen) -> dict[str, Any]:
    """Record the choices and return the modelled ladder."""
    plain = record(frozen, machine.num_ranks)
    smooth = record(frozen, machine.num_ranks, smoothing=frozen.smoothing)
    model = Model(machine, frozen.shape)
    table, spread = tables(plain[0], frozen.shape.experts, machine.num_ranks)
    climbs = []
    for rung in RUNGS:
        steps = (smooth if rung.smoothing else plain)[1:]
        climbs.append([model.step(rung, s, spread if rung.replicas else table) for s in steps])
    base = sum(step.step_ms for step in climbs[0])
    rows = [
        _row(rung, steps, base / sum(step.step_ms for step in steps))
        for rung, steps in zip(RUNGS, climbs, strict=True)
    ]
    # Where nothing is routed, request-level and token-level are the same run.
    rows.append(_row(CONTROL, [model.dense(step) for step in plain[1:]], 1.0))
    return {
        "topology": machine.name,
        "shape": asdict(frozen.shape),
        "tokens": frozen.tokens,
        "rows": rows,
    }


def tables(first: Recorded, experts: int, ranks: int) -> tuple[RoutingTable, RoutingTable]:
    """Return the table in order, and one with a spare slot a rank for what `first` shows hot."""
    layers = range(first.topk_ids_TLK.shape[1])
    load_LE = np.stack(
        [np.bincount(first.topk_ids_TLK[:, layer].ravel(), minlength=experts) for layer in layers]
    )
    return contiguous(len(layers), experts, ranks), replicated(load_LE, ranks, version=1)


class Model:
    """Times of the layers of `shape` on the ranks of `machine`."""

    def __init__(self, machine: Topology, shape: Shape) -> None:
        self.machine, self.shape = machine, shape

    def step(self, rung: Rung, recorded: Recorded, table: RoutingTable) -> StepFigures:
        """Return the figures of one step of a routed rung."""
        layers = [
            Layer(self, rung.mode, phy_TK, recorded, table) for phy_TK in placed(recorded, table)
        ]
        times = [layer.time_us() for layer in layers]
        repeats = self._repeats(len(layers))
        ranks_TLK = np.stack([table.rank_of_phy[layer.phy_TK] for layer in layers], axis=1)
        rows_LG = layer_rows(ranks_TLK, recorded.homes_T, self.machine.num_ranks)
        total_us = float(repeats @ times)
        busy_us = float(repeats @ [layer.slowest_us for layer in layers])
        return StepFigures(
            step_ms=total_us / 1e3,
            comm_ms=(total_us - busy_us) / 1e3,
            messages=int(repeats @ [layer.messages for layer in layers]),
            num_bytes=int(repeats @ [layer.num_bytes for layer in layers]),
            compute_ms_G=repeats @ np.stack([layer.compute_us_G for layer in layers]) / 1e3,
            busiest_rows=float(repeats @ rows_LG.max(axis=1)),
            mean_rows=float(repeats @ rows_LG.mean(axis=1)),
        )

    def dense(self, recorded: Recorded) -> StepFigures:
        """Return the figures of one step of the dense control."""
        shape, compute = self.shape, self.machine.compute
        rows_G = np.bincount(recorded.homes_T, minlength=self.machine.num_ranks)
        values = shape.top_k * shape.expert_values
        each_us = [
            compute.time_us(2 * values * n, (values + 2 * shape.hidden * n) * shape.bytes_per_value)
            for n in rows_G.tolist()
        ]
        compute_ms_G = np.array(each_us) * shape.moe_layers / 1e3
        return StepFigures(
            step_ms=float(compute_ms_G.max()),
            comm_ms=0.0,
            messages=0,
            num_bytes=0,
            compute_ms_G=compute_ms_G,
            busiest_rows=float(rows_G.max()),
            mean_rows=float(rows_G.mean()),
        )

    def compute_us(self, rows_P: Int, table: RoutingTable) -> Float:
        """Return (G,) how long each rank computes `rows_P` rows of its experts."""
        shape = self.shape
        times_G = []
        for rank in range(self.machine.num_ranks):
            held = rows_P[table.rank_of_phy == rank]
            rows, touched = int(held.sum()), int((held > 0).sum())
            values = shape.expert_values * touched + 2 * shape.hidden * rows
            times_G.append(
                self.machine.compute.time_us(
                    2.0 * shape.expert_values * rows, values * shape.bytes_per_value
                )
            )
        return np.array(times_G)

    def _repeats(self, recorded: int) -> Int:
        """Return how many of the model's layers take each recorded one: 32 by 4 are 8 each."""
        return np.bincount(np.arange(self.shape.moe_layers) % recorded, minlength=recorded)


class Layer:
    """One routed layer: its time, and what is sent and computed in it."""

    def __init__(
        self, model: Model, mode: str, phy_TK: Int, recorded: Recorded, table: RoutingTable
    ) -> None:
        self.model, self.mode, self.table = model, mode, table
        self.phy_TK, self.recorded = phy_TK, recorded
        self.messages = self.num_bytes = 0
        self.slowest_us = 0.0
        """The slowest rank's computing, summed over launches."""
        self.compute_us_G: Float = np.zeros(model.machine.num_ranks)

    def time_us(self) -> float:
        """Return the layer's time by the formula of its mode, and fill the books."""
        if self.mode == "overlapped":
            (comm_a, comp_a, back_a), (comm_b, comp_b, back_b) = map(self._part, self._halves())
            return comm_a + max(comp_a, comm_b) + max(comp_b, back_a) + back_b
        parts = self._requests() if self.mode == "request" else [np.arange(len(self.phy_TK))]
        return sum(sum(self._part(part)) for part in parts)

    def _part(self, rows: Int) -> tuple[float, float, float]:
        """Return comm (counts and rows out), comp and back of some rows, microseconds."""
        machine, table = self.model.machine, self.table
        homes_N = np.repeat(self.recorded.homes_T[rows], self.phy_TK.shape[1])
        phy_N = self.phy_TK[rows].ravel()
        rows_GG = np.zeros((machine.num_ranks, machine.num_ranks), np.int64)
        np.add.at(rows_GG, (homes_N, table.rank_of_phy[phy_N]), 1)
        np.fill_diagonal(rows_GG, 0)
        messages_GG = rows_GG if self.mode == "naive" else np.minimum(rows_GG, 1)
        bytes_GG = rows_GG * self.model.shape.hidden * self.model.shape.bytes_per_value
        out = machine.all_to_all(bytes_GG, messages_GG).us
        back = machine.all_to_all(bytes_GG.T, messages_GG.T).us
        compute_G = self.model.compute_us(np.bincount(phy_N, minlength=table.num_physical), table)
        comp = float(compute_G.max())
        self.compute_us_G += compute_G
        self.slowest_us += comp
        self.messages += 2 * int(messages_GG.sum())
        self.num_bytes += 2 * int(bytes_GG.sum())
        return self._count_us() + out, comp, back

    def _count_us(self) -> float:
        """Return the time of saying how many rows come for each expert, and book it."""
        machine = self.model.machine
        slots_G = np.bincount(self.table.rank_of_phy, minlength=machine.num_ranks)
        bytes_GG = np.tile(slots_G * COUNT_BYTES, (machine.num_ranks, 1))
        np.fill_diagonal(bytes_GG, 0)
        messages_GG = 1 - np.eye(machine.num_ranks, dtype=np.int64)
        self.messages += int(messages_GG.sum())
        self.num_bytes += int(bytes_GG.sum())
        return machine.all_to_all(bytes_GG, messages_GG).us

    def _halves(self) -> tuple[Int, Int]:
        """Return the first and the second half of every rank's rows, the odd one in the first."""
        first: list[int] = []
        second: list[int] = []
        for rank in range(self.model.machine.num_ranks):
            rows = np.flatnonzero(self.recorded.homes_T == rank).tolist()
            half = (len(rows) + 1) // 2
            first += rows[:half]
            second += rows[half:]
        return np.array(first, np.int64), np.array(second, np.int64)

    def _requests(self) -> list[Int]:
        """Return the rows of each round: the i-th request of every rank."""
        rounds: dict[int, list[Int]] = {}
        ids_T, homes_T = self.recorded.request_ids_T, self.recorded.homes_T
        for rank in range(self.model.machine.num_ranks):
            for turn, request in enumerate(np.unique(ids_T[homes_T == rank])):
                rounds.setdefault(turn, []).append(np.flatnonzero(ids_T == request))
        return [np.concatenate(parts) for parts in rounds.values()]


def placed(recorded: Recorded, table: RoutingTable) -> Iterator[Int]:
    """Yield for each recorded layer the (T, K) physical experts, as the engine places them."""
    placer, homes_T = Placer(), torch.from_numpy(recorded.homes_T)
    for layer in range(recorded.topk_ids_TLK.shape[1]):
        ids_TK = torch.from_numpy(np.ascontiguousarray(recorded.topk_ids_TLK[:, layer]))
        yield placer.place(ids_TK, homes_T, table, layer).numpy()


def _row(rung: Rung, steps: Sequence[StepFigures], throughput: float) -> dict[str, Any]:
    return row_of(rung.name, steps, throughput=throughput, same_output=None, label="modelled")
