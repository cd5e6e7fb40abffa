"""Clicks while the page is at work: each waits for its turn, none is lost, a second is none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from dashboards.turns import Turns
from engine.errors import RequestError


class FakeSession:
    """Runs work as a page does, and keeps the refusals."""

    def __init__(self) -> None:
        self.refusals: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    def later(self, work: Callable[[], Any], then: Any, after: Callable[[], None]) -> None:
        async def run() -> None:
            try:
                await asyncio.to_thread(work)
            except RequestError as refusal:
                self.refusals.append(str(refusal))
            finally:
                after()

        self.tasks.append(asyncio.get_running_loop().create_task(run()))


def test_what_is_asked_during_work_is_done_afterwards_once_and_in_order():
    session, done, free = FakeSession(), [], threading.Event()

    def measure() -> None:
        assert free.wait(10)
        done.append("measure")

    async def clicks() -> None:
        turns = Turns(session)
        turns.ask("observe", "Measuring", measure)
        turns.ask("act", "Acting", lambda: done.append("act"))
        turns.ask("observe", "Measuring", measure)
        turns.ask("hint", "Asking", lambda: done.append("hint"))
        turns.ask("act", "Acting", lambda: done.append("again"))
        assert turns.said == "Measuring, then: Acting, then: Asking …"
        free.set()
        while turns.said:
            await asyncio.sleep(0.01)
        turns.ask("act", "Acting", lambda: done.append("act"))
        await session.tasks[-1]

    asyncio.run(clicks())
    assert done == ["measure", "act", "hint", "act"]


def test_a_refusal_holds_up_nothing_behind_it():
    session, done = FakeSession(), []

    def refuse() -> None:
        raise RequestError("no such expert.")

    async def clicks() -> None:
        turns = Turns(session)
        turns.ask("act", "Acting", refuse)
        turns.ask("hint", "Asking", lambda: done.append("hint"))
        while turns.said:
            await asyncio.sleep(0.01)

    asyncio.run(clicks())
    assert (session.refusals, done) == (["no such expert."], ["hint"])
