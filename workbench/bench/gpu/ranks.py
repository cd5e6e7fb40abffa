"""Ranks: dispatch and combine on one GPU, what its streams hide, and NCCL where there are several.

On one GPU a group of one member sends to itself, so that the whole way of rows is walked: counts,
rows, results, every mode. With several GPUs each gets a process and rows travel by NCCL. A dry run
takes Gloo on the CPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from engine.config import EXCHANGES
from engine.exchange.group import Arrival, Group, backend_of, host_store, join_store
from engine.exchange.ranks import RankDispatcher
from engine.faults import Faults
from engine.kernels.registry import Target, bind
from workbench.bench import dispatch
from workbench.bench.gpu.setting import Row, Setting

TOKENS, HIDDEN = 4096, 4096
MATRIX = 4096
TIMEOUT_S = 20.0
ROUNDS = 5
MOST_RANKS = 8


def run(setting: Setting) -> None:
    """Walk the way of rows on one device, look at its streams, then use all devices there are."""
    store = host_store()
    device = torch.device("cpu") if setting.dry else torch.device("cuda", 0)
    group = Group(join_store(store.port, TIMEOUT_S), 1, [0], 0, TIMEOUT_S, device=device)
    tokens, hidden = (16, 32) if setting.dry else (TOKENS, HIDDEN)
    ops = bind(Target(device=device.type, dtype="float32", deterministic=False))
    dispatcher = RankDispatcher(ops, Faults())
    dispatcher.join(group)
    with torch.inference_mode():
        for mode in EXCHANGES:
            # Naive sends a message a row and request-level an exchange a request: fewer of them.
            rows = tokens if mode in ("grouped", "overlapped") else min(tokens, 64)
            with setting.case(what="one rank", mode=mode, tokens=rows) as row:
                ms = _one_rank(dispatcher, group, mode, rows, hidden)
                row |= {"backend": group.backend, "right": True}
                _tell(setting, row, ms=ms)
        with setting.case(what="streams", tokens=tokens) as row:
            _streams(setting, group, tokens, hidden, row)
    dispatcher.join(None)
    _all_devices(setting)


def _one_rank(
    dispatcher: RankDispatcher, group: Group, mode: str, tokens: int, hidden: int
) -> float:
    """Send rows to themselves and back; `take` fails unless they come home as they left."""
    samples = [
        dispatch.take(dispatch.Turn(mode, tokens, seed), dispatcher, group, hidden)
        for seed in range(ROUNDS)
    ]
    return statistics.median(sample.ms for sample in samples[1:])


def _tell(setting: Setting, row: Row, **figures: float) -> None:
    """Write figures into a row; a dry run has none."""
    if not setting.dry:
        row |= {name: round(value, 4) for name, value in figures.items()}


def _streams(setting: Setting, group: Group, tokens: int, hidden: int, row: Row) -> None:
    """Time a product and an exchange one after the other, and the exchange beside the product."""
    device, matrix = group.device, 64 if setting.dry else MATRIX
    send_SD = torch.ones(tokens, hidden, device=device)
    left = torch.ones(matrix, matrix, device=device)

    def exchange() -> Arrival:
        return group.all_to_all(send_SD, [tokens], [tokens], "the streams' exchange")

    def apart() -> torch.Tensor:
        exchange().wait()
        return left @ left

    def beside() -> torch.Tensor:
        arrival = exchange()
        product = left @ left
        arrival.wait()
        return product

    apart_ms, beside_ms, alone_ms = (
        _timed(call, device) for call in (apart, beside, lambda: left @ left)
    )
    hidden_ms = max(0.0, apart_ms - beside_ms)
    share = hidden_ms / max(apart_ms - alone_ms, 1e-6)
    _tell(setting, row, apart_ms=apart_ms, beside_ms=beside_ms, hidden_share=share)
    row["right"] = bool(torch.equal(exchange().wait(), send_SD))


def _timed(call: Callable[[], torch.Tensor], device: torch.device) -> float:
    times = []
    for _ in range(ROUNDS):
        dispatch.finish(device)
        began = time.perf_counter()
        call()
        dispatch.finish(device)
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times[1:])


def _all_devices(setting: Setting) -> None:
    """Exchange between all devices: a process and a GPU for each rank."""
    found = 0 if setting.dry else torch.cuda.device_count()
    ranks = 2 if setting.dry else min(found, MOST_RANKS)
    tokens, hidden = (8, 32) if setting.dry else (1024, HIDDEN)
    backend = backend_of(setting.device)
    for mode in EXCHANGES:
        with setting.case(what="all devices", mode=mode, backend=backend) as row:
            if ranks < 2:
                row["skipped"] = f"{found} GPU: an exchange between GPUs needs two"
                continue
            if setting.seconds_left < 0:
                row["skipped"] = "the section's time was up"
                continue
            turns = [dispatch.Turn(mode, tokens, seed) for seed in range(ROUNDS)]
            samples = dispatch.exchanged(turns, ranks, hidden, setting.device.type)
            slowest = [max(sample.ms for sample in each) for each in samples[1:]]
            row["ranks"], row["tokens"], row["right"] = ranks, tokens, True
            _tell(setting, row, ms=statistics.median(slowest))
