"""A service under load (`make service`): many clients, some leave, a rank dies, nothing is lost.

Each prints what it measured; `-s` shows it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from dataclasses import dataclass, field

import httpx
import numpy as np
import pytest

from engine.serve.config import Limits
from engine.serve.memory import resident_bytes
from tests.serve.conftest import NAME, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CLIENTS, LEAVING, RANKS = 100, 10, 4
PROMPTS = (
    "It is a truth universally",
    "Der Server ist",
    "Le serveur de messagerie",
    "您可以使用此命令",
    "12 * 7 = ",
)


@dataclass(slots=True)
class Heard:
    """What one client got."""

    text: str = ""
    reason: str | None = None
    first_s: float = 0.0
    whole_s: float = 0.0
    left: bool = False
    problem: str = ""
    chunks: int = field(default=0)


def body(number: int) -> dict[str, object]:
    rng = random.Random(number)
    return {
        "model": NAME,
        "prompt": " ".join([rng.choice(PROMPTS)] * rng.randint(1, 8)),
        "max_tokens": rng.randint(8, 96),
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


async def follow(client: httpx.AsyncClient, number: int, *, leaves: bool) -> Heard:
    heard, began = Heard(left=leaves), time.monotonic()
    try:
        async with client.stream("POST", "/v1/completions", json=body(number)) as response:
            assert response.status_code == 200, response.status_code
            async for line in response.aiter_lines():
                if not line or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    heard.problem = chunk["error"]["code"]
                    break
                heard.first_s = heard.first_s or time.monotonic() - began
                heard.text += chunk["choices"][0]["text"]
                heard.reason = chunk["choices"][0]["finish_reason"]
                heard.chunks += 1
                if leaves and heard.chunks == 4:
                    return heard
    except httpx.HTTPError as wrong:
        heard.problem = type(wrong).__name__
    heard.whole_s = time.monotonic() - began
    return heard


async def crowd(url: str, *, leaving: int, strike=None) -> list[Heard]:
    limits = httpx.Limits(max_connections=CLIENTS + 1)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        tasks = [
            asyncio.create_task(follow(client, number, leaves=number < leaving))
            for number in range(CLIENTS)
        ]
        if strike is not None:
            await asyncio.sleep(1.5)
            strike()
        return list(await asyncio.gather(*tasks))


def p99(heard: list[Heard]) -> float:
    return float(np.percentile([one.whole_s for one in heard if not one.left], 99))


def test_a_hundred_clients_some_leave_and_a_rank_is_killed(make_server):
    engine = {"num_ranks": RANKS, "deterministic": True, "max_running": 32, "num_blocks": 512,
              "prefix_reuse": True}  # fmt: skip
    server = make_server(engine, limits=Limits(queued=200))
    calm = asyncio.run(crowd(server.url, leaving=0))
    assert not any(one.problem for one in calm)
    again = asyncio.run(crowd(server.url, leaving=0))
    assert [one.text for one in again] == [one.text for one in calm]
    before = server.service.loop.books.aborted

    def strike() -> None:
        os.kill(server.service.engine.ranks[2], signal.SIGKILL)

    rough = asyncio.run(crowd(server.url, leaving=LEAVING, strike=strike))
    assert until(lambda: server.service.loop.books.running == 0, 10)
    books = server.service.loop.books
    undisturbed = p99(again)  # the cache knows the prompts by then, as in the run to come
    print(
        f"\n{CLIENTS} streaming clients, {RANKS} ranks: P99 {p99(calm):.2f} and {p99(again):.2f} s "
        f"undisturbed, {p99(rough):.2f} s with {LEAVING} leaving and a rank killed; {books}"
    )
    assert "killed by signal 9" in str(server.service.reason())
    for quiet, disturbed in zip(calm, rough, strict=True):
        assert not disturbed.problem
        if not disturbed.left:
            assert (disturbed.text, disturbed.reason) == (quiet.text, quiet.reason)
    assert books.aborted - before == LEAVING and books.failed == 0
    assert books.started == 3 * CLIENTS + 1, "theirs, and the first one of the start"
    stats = server.service.engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert p99(rough) < 3 * undisturbed


@pytest.mark.parametrize("minutes", [10])
def test_minutes_of_load_leave_no_memory_and_lose_no_request(make_server, minutes):
    """Resident memory at minute 2 and at the end within 3 %, and the books add up."""
    minutes = float(os.environ.get("LOAD_MINUTES", minutes))
    server = make_server(
        {"max_running": 16, "num_blocks": 512, "prefix_reuse": True}, limits=Limits(queued=100)
    )
    seen: list[tuple[float, int]] = []

    async def one(client: httpx.AsyncClient, until_s: float, seed: int) -> int:
        done, rng = 0, random.Random(seed)
        while time.monotonic() < until_s:
            await follow(client, rng.randint(0, 500), leaves=rng.random() < 0.1)
            done += 1
        return done

    async def run() -> int:
        began = time.monotonic()
        limits = httpx.Limits(max_connections=24)
        async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
            ends = began + 60 * minutes
            tasks = [asyncio.create_task(one(client, ends, seed)) for seed in range(20)]
            for at in (0.2 * minutes, minutes):
                await asyncio.sleep(max(0.0, began + 60 * at - time.monotonic()))
                seen.append((at, resident_bytes(os.getpid()) or 0))
            return sum(await asyncio.gather(*tasks))

    number = asyncio.run(run())
    assert until(lambda: server.service.loop.books.running == 0, 10)
    books = server.service.loop.books
    early, late = (size for _, size in seen)
    print(
        f"\n{number} requests in {minutes:g} minutes; resident {early / 1e6:.1f} MB at minute "
        f"{seen[0][0]:g}, {late / 1e6:.1f} MB at the end; {books}"
    )
    assert abs(late - early) <= 0.03 * early
    assert books.started == books.finished + books.aborted == number + 1
    assert books.failed == 0 and books.aborted > 0
    assert not server.service.loop._collector._wanted
