"""Dispatch and combine alone: N processes, no model, every way to exchange, at growing sizes.

The processes hold a group and a dispatcher, as ranks do, and take turns through modes and sizes:
rows go to their experts' ranks and come home as they are. A sample is the slowest rank's time from
a common start; a row is the median over rounds. Each token is a request of its own, as in decoding,
so request-level needs as many rounds as a rank has tokens, and up to one token a rank it is the
same exchange as grouped.

The transfer model (`engine.exchange.topology`, data/hardware/laptop.json) is held against the same
exchanges. It knows neither the permutations that are timed here nor how many ranks share a core.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from engine.config import EXCHANGES, MAX_RANKS, EngineConfig
from engine.errors import ExchangeError, RequestError
from engine.exchange.dispatch import traffic
from engine.exchange.group import Group, host_store, join_store
from engine.exchange.ranks import RankDispatcher
from engine.exchange.topology import Topology
from engine.faults import Faults
from engine.kernels.registry import Target, bind
from engine.routing.placement import contiguous
from engine.routing.table import Int
from workbench import paths
from workbench.bench.machine import report

HIDDEN, EXPERTS, TOP_K = 256, 8, 2
"""The bundled model's shape."""
SIZES = (8, 32, 128, 512, 1024)
SMALL = (2, 4, 16)
"""Sizes between which request-level and grouped may change places."""
TIMEOUT_S = 60.0
AIM = 1 / 8
"""Grouped by naive at the largest size."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One dispatch and combine, on one rank."""

    ms: float
    messages: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Turn:
    """What all ranks do next."""

    mode: str
    tokens: int
    seed: int


def run(
    model: Any = None,
    *,
    ranks: int = 4,
    sizes: tuple[int, ...] = SIZES,
    rounds: int = 7,
    hidden: int = HIDDEN,
) -> dict[str, Any]:
    """Measure one row for each mode and size.

    Args:
        model: not used; every benchmark takes one.
        ranks: processes.
        sizes: tokens of all ranks together.
        rounds: samples of each; one round before is thrown away.
        hidden: D.

    Raises:
        RequestError: a number is too small.
        ExchangeError: a process did not start or did not answer.
    """
    if not 2 <= ranks <= MAX_RANKS or min(*sizes, rounds, hidden) < 1:
        raise RequestError(
            f"ranks ({ranks}) must be at least 2, at most {MAX_RANKS}; sizes, rounds and hidden "
            "at least 1."
        )
    swept = tuple(sorted({*SMALL, *sizes}))
    turns = [
        Turn(mode, tokens, seed)
        for seed in range(rounds + 1)
        for tokens in swept
        for mode in EXCHANGES[seed % len(EXCHANGES) :] + EXCHANGES[: seed % len(EXCHANGES)]
    ]
    samples: dict[tuple[str, int], list[list[Sample]]] = defaultdict(list)
    for turn, sample in zip(turns, exchanged(turns, ranks, hidden), strict=True):
        if turn.seed:  # the first round warms up
            samples[turn.mode, turn.tokens].append(sample)
    machine = _machine(ranks)
    rows = [
        _row(mode, tokens, samples[mode, tokens], machine, hidden)
        for tokens in swept
        for mode in EXCHANGES
    ]
    words = f"--ranks {ranks} --sizes {','.join(map(str, sizes))} --rounds {rounds}"
    found = report(rows, f"workbench bench dispatch {words} --json")
    return found | _findings(rows, samples, ranks)


def routing(tokens: int, ranks: int, seed: int) -> tuple[Int, Int]:
    """Return homes (T,), in equal shares, and each token's experts (T, K), any as likely as others.

    5 tokens on 2 ranks live on ``[0, 1, 0, 1, 0]``.
    """
    rng = np.random.default_rng(seed)
    ids_TK = np.argsort(rng.random((tokens, EXPERTS)), axis=1)[:, :TOP_K]
    return np.arange(tokens) % ranks, ids_TK.astype(np.int64)


def modelled_ms(
    machine: Topology, mode: str, homes_T: Int, ids_TK: Int, hidden: int = HIDDEN
) -> float:
    """Return the transfer model's time of the three exchanges of one layer: count, out and back.

    `overlapped` has nothing to hide behind here, so it is two grouped exchanges.
    """
    ranks = machine.num_ranks
    table = contiguous(1, EXPERTS, ranks)
    off_GG = 1 - np.eye(ranks, dtype=np.int64)
    slots_G = np.bincount(table.rank_of_phy, minlength=ranks)
    count_us = machine.all_to_all(np.tile(slots_G * 8, (ranks, 1)) * off_GG, off_GG).us
    total_us = 0.0
    for part in _parts(mode, homes_T, ranks):
        rows_GG = traffic(homes_T[part], ids_TK[part], table) * off_GG
        messages_GG = rows_GG if mode == "naive" else np.minimum(rows_GG, 1)
        for sent_GG, count_GG in ((rows_GG, messages_GG), (rows_GG.T, messages_GG.T)):
            total_us += machine.all_to_all(sent_GG * hidden * 4, count_GG).us
        total_us += count_us
    return total_us / 1e3


def _parts(mode: str, homes_T: Int, ranks: int) -> list[Int]:
    """Return the rows of each exchange: by request, in halves, or all at once."""
    turn_T = np.zeros_like(homes_T)
    for rank in range(ranks):
        mine = homes_T == rank
        turn_T[mine] = np.arange(mine.sum())
    if mode == "request":
        return [np.flatnonzero(turn_T == turn) for turn in range(int(turn_T.max()) + 1)]
    if mode == "overlapped":
        half_G = (np.bincount(homes_T, minlength=ranks) + 1) // 2
        first = turn_T < half_G[homes_T]
        return [np.flatnonzero(first), np.flatnonzero(~first)]
    return [np.arange(len(homes_T))]


def exchanged(
    turns: list[Turn], ranks: int, hidden: int, device: str = "cpu"
) -> list[list[Sample]]:
    """Take every turn on `ranks` processes; returns for each turn a sample of every rank."""
    context = multiprocessing.get_context("spawn")
    store = host_store()
    pipes, processes = [], []
    try:
        for me in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank,
                args=(theirs, store.port, me, ranks, hidden, turns, device),
                daemon=True,
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        by_rank: list[list[Sample]] = []
        for me, pipe in enumerate(pipes):
            try:
                answer = pipe.recv()
            except EOFError:
                raise ExchangeError(
                    f"rank {me} of the benchmark ended without an answer."
                ) from None
            if isinstance(answer, str):
                raise ExchangeError(answer)
            by_rank.append(answer)
        return [list(samples) for samples in zip(*by_rank, strict=True)]
    finally:
        for process in processes:
            process.join(5)
            process.kill()


def _rank(
    pipe: Connection,
    port: int,
    me: int,
    ranks: int,
    hidden: int,
    turns: list[Turn],
    kind: str,
) -> None:
    """Take every turn as one rank; the target of the processes."""
    torch.set_num_threads(1)
    try:
        device = torch.device("cpu") if kind == "cpu" else torch.device(kind, me)
        store = join_store(port, TIMEOUT_S)
        group = Group(store, 1, range(ranks), me, TIMEOUT_S, device=device)
        dispatcher = RankDispatcher(
            bind(Target(device=kind, dtype="float32", deterministic=False)), Faults()
        )
        dispatcher.join(group)
        with torch.inference_mode():
            pipe.send([take(turn, dispatcher, group, hidden) for turn in turns])
    except ExchangeError as failed:
        pipe.send(str(failed))
    with suppress(EOFError, OSError):
        pipe.close()
    os._exit(0)  # a collective that never finishes would keep its threads alive


def take(turn: Turn, dispatcher: RankDispatcher, group: Group, hidden: int) -> Sample:
    """Dispatch and combine one layer's rows once."""
    ranks = group.size
    homes_T, ids_TK = routing(turn.tokens, ranks, turn.seed)
    device = group.device
    mine_TK = torch.from_numpy(ids_TK[homes_T == group.me]).to(device)
    x_TD = torch.full((len(mine_TK), hidden), float(group.me), device=device)
    weights_TK = torch.full(mine_TK.shape, 1 / TOP_K, device=device)
    table = contiguous(1, EXPERTS, ranks)
    most = -(-turn.tokens // ranks)
    dispatcher.begin(turn.mode, [1] * len(mine_TK), most, table)
    group.meet("the common start")
    finish(device)
    began = time.perf_counter()
    returns = []
    for flight in dispatcher.dispatch(x_TD, mine_TK, table, 0, _no_clock):
        rows_RD, handle = flight.arrive()
        returns.append(dispatcher.combine(rows_RD, weights_TK[flight.part], handle, table))
    y_TD = torch.cat([result.arrive() for result in returns])
    finish(device)
    ms = (time.perf_counter() - began) * 1e3
    assert torch.equal(y_TD, x_TD), "rows did not come home as they left"
    exchanged = dispatcher.exchanged
    return Sample(ms, int(exchanged.messages_G.sum()), int(exchanged.bytes_G.sum()))


def finish(device: torch.device) -> None:
    """Wait until a GPU has done what it was told; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _no_clock(stage: str) -> None:
    """Take no time of stages."""


def _machine(ranks: int) -> Topology | None:
    """Return the laptop on paper, or None where it has too few ranks."""
    machine = Topology.read(paths.data("hardware", "laptop.json"))
    return machine.for_ranks(ranks) if ranks <= machine.num_ranks else None


def _row(
    mode: str, tokens: int, samples: list[list[Sample]], machine: Topology | None, hidden: int
) -> dict[str, Any]:
    slowest = [max(sample.ms for sample in each) for each in samples]
    ms = statistics.median(slowest)
    paper = None
    if machine:
        times = [
            modelled_ms(machine, mode, *routing(tokens, machine.num_ranks, seed + 1), hidden)
            for seed in range(len(samples))
        ]
        paper = statistics.median(times)
    return {
        "tokens": tokens,
        "mode": mode,
        "ms": round(ms, 3),
        "ms_best": round(min(slowest), 3),
        "messages": _median(sum(sample.messages for sample in each) for each in samples),
        "bytes": _median(sum(sample.num_bytes for sample in each) for each in samples),
        "model_ms": None if paper is None else round(paper, 3),
        "model_error": None if paper is None else round(paper / ms - 1, 3),
        "model_error_formula": "modelled / measured median, minus 1; laptop.json, nothing fitted",
    }


def _findings(
    rows: list[dict[str, Any]], samples: dict[tuple[str, int], list[list[Sample]]], ranks: int
) -> dict[str, Any]:
    ms = {(row["mode"], row["tokens"]): row["ms"] for row in rows}
    sizes = sorted({row["tokens"] for row in rows})
    largest = sizes[-1]
    paired = zip(samples["grouped", largest], samples["naive", largest], strict=True)
    ratio = statistics.median(
        max(sample.ms for sample in ours) / max(sample.ms for sample in theirs)
        for ours, theirs in paired
    )
    crossover = crossing([(n, ms["request", n], ms["grouped", n]) for n in sizes if n > ranks])
    default = EngineConfig.__dataclass_fields__["small_batch_rows"].default
    return {
        "crossover_tokens": crossover,
        "small_batch_rows": default,
        "grouped_by_naive": {"tokens": largest, "ratio": round(ratio, 4), "aim": AIM},
        "notes": [
            f"grouped is faster than request-level from {crossover} tokens on; up to {ranks}, one "
            "a rank, the two are the same exchange"
            if crossover
            else "grouped is not faster than request-level at the largest size",
            f"EngineConfig.small_batch_rows is {default} by default",
            f"grouped takes {ratio:.3f} of naive's time at {largest} tokens; the aim is at most "
            f"{AIM:.3f}",
        ],
    }


def crossing(times: list[tuple[int, float, float]]) -> int | None:
    """Return the smallest size from which on grouped is faster than request-level; None if none.

    ``[(2, 1.0, 1.1), (4, 1.5, 1.2), (8, 3.0, 1.3)]`` of (tokens, request ms, grouped ms) give 4.
    """
    found = None
    for tokens, request_ms, grouped_ms in sorted(times, reverse=True):
        if grouped_ms >= request_ms:
            break
        found = tokens
    return found


def _median(values: Iterable[int]) -> int:
    return round(float(statistics.median(values)))
