"""The engine's own thread: takes requests from callers, steps, and hands out what each gained.

Callers live in an asyncio loop. Everything that touches the engine's queues happens on this thread,
so no caller can stall a step, and a slow caller costs the text it has not read yet and no more.

Every request is counted once: started = finished + aborted + failed + running, always.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from engine.config import SamplingParams
from engine.errors import WorkbenchError
from engine.runtime.engine import Engine
from engine.runtime.results import RequestOutput
from engine.serve import errors
from engine.serve.routing import RoutingCollector, Wish

log = logging.getLogger("engine.serve")

LOOK_EVERY_S = 0.5
IDLE_S = 0.05
MAX_FAILURES = 3
"""Steps in a row that may fail before the engine is given up."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one completion of a call gained; the last one is `finished`."""

    index: int
    """Which of the call's completions."""
    output: RequestOutput
    routing: dict[str, Any] | None = None
    """With the last piece, if the call asked."""


@dataclass(eq=False)
class Call:
    """The completions of one caller, on their way from the engine's thread to the caller's loop."""

    home: asyncio.AbstractEventLoop
    size: int
    """How many completions it has."""
    num_open: int = 0
    """Completions that have not ended, as the engine's thread knows."""
    gone: bool = False
    """Whether the caller has left."""
    started_s: float = field(default_factory=time.monotonic)
    last_s: dict[int, float] = field(default_factory=dict)
    """By completion: when its last tokens came."""
    arrived: asyncio.Queue[Piece | errors.ApiError] = field(default_factory=asyncio.Queue)

    def deliver(self, items: list[Piece | errors.ApiError]) -> None:
        """Hand items over to the caller; called on the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the caller's loop has closed
            self.home.call_soon_threadsafe(self._put, items)

    def _put(self, items: list[Piece | errors.ApiError]) -> None:
        for item in items:
            self.arrived.put_nowait(item)


@dataclass(frozen=True, slots=True)
class Spec:
    """One completion to make."""

    token_ids: tuple[int, ...]
    params: SamplingParams
    wish: Wish | None = None
    label: str = ""
    priority: int = 0


@dataclass(slots=True)
class Books:
    """How the requests went so far."""

    started: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0

    @property
    def running(self) -> int:
        """Requests under way, those that wait included."""
        return self.started - self.finished - self.aborted - self.failed


Observe = Callable[[Call, list[Piece]], None]


class EngineLoop:
    """Steps one engine on a thread of its own."""

    def __init__(
        self,
        engine: Engine,
        collector: RoutingCollector,
        *,
        queued: int,
        observe: Observe = lambda call, pieces: None,
        look: Callable[[Engine], None] = lambda engine: None,
    ) -> None:
        """Prepare; `start` begins.

        Args:
            engine: nobody else may step it from now on.
            collector: one of the engine's sinks.
            queued: most requests beyond those that a step can run.
            observe: is told of every delivery, on the engine's thread.
            look: is called twice a second on the engine's thread.
        """
        self.engine = engine
        self.books = Books()
        self.error: str | None = None
        """Why the engine runs no more."""
        self._collector, self._observe, self._look = collector, observe, look
        self._max_open = engine.config.max_running + queued
        self._queued = queued
        self._draining = False
        self._ending = False
        self._live: dict[int, tuple[Call, int]] = {}
        self._todo: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._failures = 0

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._draining

    def start(self) -> None:
        """Begin to step."""
        self._thread.start()

    def submit(self, specs: list[Spec]) -> Call:
        """Queue the completions of one caller, all or none; called in the caller's event loop.

        Raises:
            ApiError: the service is ending, the engine is dead, or too many wait already.
        """
        call = Call(asyncio.get_running_loop(), len(specs), num_open=len(specs))
        with self._lock:
            if self.error is not None:
                raise errors.dead()
            if self._draining:
                raise errors.draining()
            if self.books.running + len(specs) > self._max_open:
                raise errors.overloaded(self._queued)
            self.books.started += len(specs)
            self._todo.put(lambda: self._add(call, specs))
        return call

    def abort(self, call: Call) -> None:
        """End what is left of a call that nobody waits for; from any thread, also when none is."""
        if call.num_open:
            call.gone = True
            self._todo.put(lambda: self._abort(call))

    def ask(self, what: Callable[[Engine], Any]) -> Future[Any]:
        """Run something between two steps; what it returns or raises is the future's."""
        answer: Future[Any] = Future()

        def run() -> None:
            try:
                answer.set_result(what(self.engine))
            except Exception as wrong:  # noqa: BLE001 - whoever asked is told; the loop goes on
                answer.set_exception(wrong)

        self._todo.put(run)
        return answer

    def drain(self) -> None:
        """Refuse new requests from now on; those under way go on."""
        with self._lock:
            self._draining = True

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is under way; False when it took too long."""
        until = time.monotonic() + timeout_s
        while self.books.running and self.error is None:
            if time.monotonic() >= until:
                return False
            time.sleep(0.02)
        return True

    def close(self, timeout_s: float = 10.0) -> None:
        """End the thread; what is still under way is aborted. The engine is closed, too."""
        self.drain()
        self._ending = True
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        self.engine.close()
        self._give_up("the service has ended")

    # ---- the engine's thread

    def _run(self) -> None:
        look_at = 0.0
        while not self._ending and self.error is None:
            busy = self.engine.has_work
            self._serve(0.0 if busy else IDLE_S)
            self._step()
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + LOOK_EVERY_S
                self._guarded_look()
        self._serve(0.0)
        for request_id in self._live:
            self.engine.abort(request_id)
        if self.error is None and self._live:
            self._step()

    def _serve(self, wait_s: float) -> None:
        """Do what callers asked for; wait for the first of it when there is nothing else to do."""
        with contextlib.suppress(queue.Empty):
            self._todo.get(timeout=wait_s)() if wait_s else self._todo.get_nowait()()
            while True:
                self._todo.get_nowait()()

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except Exception as failure:  # noqa: BLE001 - one bad step must not end the service
            self._failed(failure)
            return
        self._failures = 0
        if outputs:
            self._hand_out(outputs)

    def _hand_out(self, outputs: list[RequestOutput]) -> None:
        by_call: defaultdict[Call, list[Piece]] = defaultdict(list)
        for output in outputs:
            if (owner := self._live.get(output.request_id)) is None:
                continue
            call, index = owner
            routing = None
            if output.completion is not None:
                del self._live[output.request_id]
                routing = self._collector.take(output.completion)
                call.num_open -= 1
                self._close_book(output.completion.finish_reason == "aborted")
            by_call[call].append(Piece(index, output, routing))
        for call, pieces in by_call.items():
            self._observe(call, pieces)
            if not call.gone:
                call.deliver([*pieces])

    def _close_book(self, aborted: bool) -> None:
        with self._lock:
            if aborted:
                self.books.aborted += 1
            else:
                self.books.finished += 1

    def _add(self, call: Call, specs: list[Spec]) -> None:
        for index, spec in enumerate(specs):
            if call.gone:
                self._close_book(aborted=True)
                continue
            try:
                request_id = self.engine.add(
                    spec.token_ids, spec.params, label=spec.label, priority=spec.priority
                )
            except WorkbenchError as refused:
                log.warning("a request that was let in was refused: %s", type(refused).__name__)
                with self._lock:
                    self.books.failed += 1
                call.deliver([errors.broken()])
                continue
            self._live[request_id] = call, index
            if spec.wish is not None:
                self._collector.want(request_id, spec.wish)

    def _abort(self, call: Call) -> None:
        for request_id, (owner, _) in self._live.items():
            if owner is call:
                self.engine.abort(request_id)

    def _failed(self, failure: Exception) -> None:
        """Give up all that runs; go on unless steps keep failing."""
        self._failures += 1
        log.error("a step of the engine failed", exc_info=failure)
        for request_id in tuple(self._live):
            self.engine.abort(request_id)
        self._give_up("a step failed")
        if self._failures >= MAX_FAILURES or not self._cleared():
            with self._lock:
                self.error = f"{type(failure).__name__} in {self._failures} steps in a row"
            log.critical("the engine is given up: %s", self.error)
            self._serve(0.0)
            self._give_up(self.error)

    def _cleared(self) -> bool:
        """Let the engine end what was aborted; says whether that worked."""
        try:
            self.engine.step()
        except Exception as failure:  # noqa: BLE001 - reported by the caller
            log.error("the engine could not let go of its requests", exc_info=failure)
            return False
        return True

    def _give_up(self, why: str) -> None:
        """Tell every caller that its request failed."""
        owners = {call for call, _ in self._live.values()}
        with self._lock:
            self.books.failed += len(self._live)
        for request_id in self._live:
            self._collector.forget(request_id)
        if self._live:
            log.error("%d requests failed: %s", len(self._live), why)
        self._live.clear()
        for call in owners:
            call.deliver([errors.broken()])

    def _guarded_look(self) -> None:
        try:
            self._look(self.engine)
        except Exception as failure:  # noqa: BLE001 - looking must not end serving
            log.error("looking at the engine failed", exc_info=failure)
