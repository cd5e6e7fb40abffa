"""A rank's own process: take messages from the controller, run steps with the others, answer.

Runs until told to stop or until the controller is gone. A step that fails because another rank died
is answered with its error; the controller then calls the survivors into a new group.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

import torch

from engine.checkpoint.load import read_config
from engine.cluster.devices import device_of
from engine.cluster.experts import ExpertStore, Gathered
from engine.cluster.host_copies import HostCopies, Shape
from engine.cluster.messages import (
    Answer,
    Ask,
    Join,
    Message,
    Publish,
    Retract,
    RunStep,
    SetFault,
    Setup,
    Stage,
    Staged,
    StepReport,
    Stop,
)
from engine.cluster.rank import Outcome, Rank, target_of
from engine.cluster.weights import load_model, weights_sha256
from engine.errors import RankError, WorkbenchError
from engine.exchange.books import flights
from engine.exchange.group import Group, join_store
from engine.exchange.migration import travellers
from engine.exchange.ranks import RankDispatcher
from engine.faults import Faults
from engine.kernels.registry import bind
from engine.model.step import StageClock

BEAT_S = 0.05
"""How often a rank says that it lives."""


def main(pipe: Connection, beats: Any, setup: Setup) -> None:
    """Live as one rank; the target of the process that `engine.cluster.launch` spawns."""
    if setup.dies_with_parent:
        _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's to handle
    torch.set_num_threads(1)
    threading.Thread(target=_beat, args=(beats, setup.me), daemon=True).start()
    try:
        worker = Worker(pipe, setup)
    except WorkbenchError as refused:
        pipe.send(Answer(error=str(refused)))
        return
    pipe.send(Answer(os.getpid()))
    try:
        worker.serve()
    except (EOFError, OSError):
        pass  # the controller is gone
    # Not by the interpreter's end: a collective that never finishes would keep its threads alive.
    sys.stdout.flush()
    os._exit(0)


class Worker:
    """One rank: its share of the model, its group, and what it does for each message."""

    def __init__(self, pipe: Connection, setup: Setup) -> None:
        config = setup.config
        self.pipe, self.setup = pipe, setup
        self.device = device_of(config, setup.me)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.store = join_store(setup.store_port, config.exchange_timeout_s)
        self.faults = Faults()
        model_config = read_config(config.model)
        ops = bind(target_of(config, model_config))
        self.dispatcher = RankDispatcher(ops, self.faults)
        copies = None
        if setup.host_copies is not None:
            copies = HostCopies(setup.host_copies, Shape.of(config, model_config))
        self.experts = ExpertStore(config, model_config, setup.me, setup.table, self.faults, copies)
        model = load_model(
            config.model,
            model_config,
            ops,
            self.faults,
            setup.num_positions,
            dtype=getattr(torch, config.dtype),
            device=self.device,
            dispatcher=self.dispatcher,
            store=self.experts,
        )
        self.rank = Rank(model.eval(), model_config, config, self.faults)
        self.experts.attach(model)
        self._send_lock = threading.Lock()

    def serve(self) -> None:
        """Answer messages in order until `Stop`."""
        while not isinstance(message := self.pipe.recv(), Stop):
            try:
                with torch.inference_mode():
                    answer = Answer(self._do(message))
            except WorkbenchError as failed:
                self.dispatcher.join(None)  # so that whoever waits for this rank learns at once
                answer = Answer(error=str(failed))
            self._send(answer)
        self._send(Answer())

    def _do(self, message: Message) -> Any:
        if isinstance(message, RunStep):
            return self._run(message)
        if isinstance(message, Join):
            return self._join(message)
        if isinstance(message, Stage):
            threading.Thread(target=self._stage, args=(message,), daemon=True).start()
            return None
        if isinstance(message, Publish):
            self.experts.publish(message.number)
            return None
        if isinstance(message, Retract):
            self.experts.retract(message.table_version)
            return None
        if isinstance(message, SetFault):
            return self._set_fault(message)
        assert isinstance(message, Ask), f"unknown message {message!r}"
        if message.what == "weights_sha256":
            return weights_sha256(self.rank.model)
        if message.what == "collectives":
            return self.dispatcher.collectives
        return resident_bytes()

    def _run(self, message: RunStep) -> StepReport:
        work, table = message.work, self.experts.table
        if message.table_version != table.version:
            raise RankError(
                f"rank {self.setup.me} holds table version {table.version}, but the step is for "
                f"version {message.table_version}; publish it on every rank first."
            )
        if not message.trial:
            self.experts.settle()
        clock, started = StageClock(keep=work.record), time.perf_counter()
        lengths = [len(span.token_ids) for span in work.spans]
        self.dispatcher.begin(message.mode, lengths, message.num_rounds, table, keep=work.record)
        outcome = self.rank.run(work, table, clock)
        spent_ms, exchanged = clock.spent_ms(), self.dispatcher.exchanged
        waited_s = exchanged.wait_s + exchanged.transfer_s
        return StepReport(
            tokens=outcome.tokens,
            logits_BV=self._wanted_logits(message, outcome),
            last_experts=outcome.last_experts,
            records=self.rank.records(outcome, work),
            bad_rows=outcome.step.bad_rows,
            stage_ms=spent_ms,
            spans=clock.spans(message.began_ns),
            flights=flights(self.dispatcher.log or (), table.num_devices, message.began_ns),
            exchanged=exchanged,
            dropped=capacity.dropped if (capacity := outcome.step.capacity) else [],
            look_ups=self.rank.look_ups,
            busy_ms=(time.perf_counter() - started - waited_s) * 1e3,
        )

    def _wanted_logits(self, message: RunStep, outcome: Outcome) -> Any:
        params = [span.draw.params for span in message.work.spans if span.draw]
        wanted = self.setup.config.hash_logits or any(each.logprobs is not None for each in params)
        return outcome.logits_BV.cpu().numpy() if wanted else None

    def _join(self, message: Join) -> Gathered:
        self.dispatcher.join(None)
        group = self._group(self.store, "exchange", message.epoch, message.members)
        self.dispatcher.join(group)
        return self.experts.join(message.table, message.now, message.moves, group)

    def _stage(self, message: Stage) -> None:
        number, started = message.number, time.perf_counter()

        def meet() -> Group:
            self._send(Staged(number, meets=True))
            # Another way to the store: waiting for a late rank must not keep a new group waiting.
            store = join_store(self.setup.store_port, self.setup.config.exchange_timeout_s)
            return self._group(store, "staging", number, travellers(message.moves))

        try:
            gathered = self.experts.stage(number, message.table, message.moves, meet)
        except WorkbenchError as failed:
            self._send(Staged(number, error=str(failed)))
        else:
            seconds = time.perf_counter() - started
            self._send(Staged(number, **asdict(gathered), seconds=seconds))

    def _group(self, store: Any, name: str, number: int, members: Sequence[int]) -> Group:
        timeout_s = self.setup.config.exchange_timeout_s
        return Group(
            store, number, members, self.setup.me, timeout_s, name=name, device=self.device
        )

    def _set_fault(self, message: SetFault) -> None:
        if message.fault is None:
            self.faults.clear(message.point)
        else:
            self.faults.set(message.point, message.fault)

    def _send(self, what: Answer | Staged) -> None:
        with self._send_lock:
            self.pipe.send(what)


def _beat(beats: Any, me: int) -> None:
    """Write down again and again that this process runs; a stopped one does not."""
    while True:
        beats[me] = time.monotonic()
        time.sleep(BEAT_S)


def _die_with_parent() -> None:
    """Ask Linux to kill this process with the thread that started it; elsewhere the pipe tells."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def resident_bytes() -> int:
    """Return the memory this process occupies; where the system does not tell, the most so far."""
    if not os.path.exists("/proc/self/statm"):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
