"""Start the ranks' processes, talk to them, notice when one is dead or frozen, end them.

Processes are spawned, never forked: a fork would copy the store's threads and locks. The controller
hosts the store through which a group's members find each other, so a group can be rebuilt whoever
dies. One thread uses this, the one that steps the engine.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

from engine.checkpoint.load import read_config
from engine.cluster.experts import Gathered
from engine.cluster.host_copies import room_for
from engine.cluster.messages import Answer, Join, Message, Setup, Staged, Stop
from engine.cluster.worker import main
from engine.config import EngineConfig
from engine.errors import RankError
from engine.exchange.group import host_store
from engine.exchange.plan import moves_between
from engine.routing.table import RoutingTable

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 5.0


class RankLostError(RankError):
    """Ranks died, froze or failed while something was asked of them."""

    def __init__(self, lost: Mapping[int, str], failed: Mapping[int, str]) -> None:
        """Say who is lost and why, and who only failed because of them."""
        self.lost, self.failed = dict(lost), dict(failed)
        reasons = [f"rank {rank} {why}" for rank, why in (lost or failed).items()]
        super().__init__("; ".join(reasons) + ".")


class Ranks:
    """The processes of one engine, by device id."""

    def __init__(self, config: EngineConfig, num_positions: int, table: RoutingTable) -> None:
        """Start all ranks and join them into the first group.

        Raises:
            RankError: one could not start; all are ended then.
        """
        self.config, self._num_positions = config, num_positions
        self._context = multiprocessing.get_context("spawn")
        self._store = host_store()
        self._room = room_for(config, read_config(config.model))
        self._beats = self._context.RawArray("d", config.num_ranks)
        self._processes: dict[int, Any] = {}
        self._pipes: dict[int, Connection] = {}
        self.staged: list[tuple[int, Staged]] = []
        """What ranks said of stagings since somebody last looked."""
        self.epoch = 0
        try:
            self.start(range(config.num_ranks), table)
            self.join(table, table)
        except BaseException:
            self.close()
            raise

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that live, ascending."""
        return tuple(sorted(self._pipes))

    def pid(self, rank: int) -> int:
        """Return the process id of a living rank."""
        return int(self._processes[rank].pid)

    def start(self, ranks: Iterable[int], table: RoutingTable) -> None:
        """Start the processes of `ranks`, which then hold their experts under `table`."""
        starting = list(ranks)
        for rank in starting:
            ours, theirs = self._context.Pipe()
            setup = Setup(
                rank,
                self.config,
                self._num_positions,
                table,
                self._store.port,
                host_copies=self._room.path if self._room else None,
                dies_with_parent=threading.current_thread() is threading.main_thread(),
            )
            process = self._context.Process(
                target=main,
                args=(theirs, self._beats, setup),
                name=f"rank {rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes[rank], self._pipes[rank] = process, ours
        self._collect(starting, START_TIMEOUT_S, frozen_counts=False)

    def join(self, now: RoutingTable, table: RoutingTable) -> dict[int, Gathered]:
        """Make all living ranks one group under a new epoch, with the experts of `table`.

        Returns what each has fetched for that.

        Args:
            now: the table in force, which says who can hand on which expert.
            table: of the new epoch.

        Raises:
            RankLostError: one is dead or frozen, or could not join.
        """
        self.epoch += 1
        members = self.members
        moves = moves_between(now, table, lost=set(range(now.num_devices)) - set(members))
        return self.ask_all(Join(self.epoch, members, table, now.version, moves))

    def ask_all(self, message: Message) -> dict[int, Any]:
        """Say the same to every living rank and return their answers.

        Raises:
            RankLostError: one is dead or frozen, or refused.
        """
        return self.ask(dict.fromkeys(self.members, message))

    def ask(self, messages: Mapping[int, Message]) -> dict[int, Any]:
        """Say something to each of some ranks and return their answers.

        Waits as long as the ranks' hearts beat: a slow one is waited for, a frozen one is not.

        Raises:
            RankLostError: one is dead or frozen, or refused.
        """
        lost = {}
        for rank, message in messages.items():
            try:
                self._pipes[rank].send(message)
            except OSError:
                lost[rank] = self._obituary(rank)
        return self._collect(messages.keys() - lost.keys(), None, lost)

    def expel(self, ranks: Iterable[int]) -> None:
        """Give up on ranks: they are killed, and one that was only frozen never comes back."""
        for rank in ranks:
            self._pipes.pop(rank).close()
            process = self._processes.pop(rank)
            process.kill()
            process.join(STOP_TIMEOUT_S)

    def stop(self, rank: int) -> None:
        """End one rank in order; the others have to join anew."""
        try:
            self._pipes[rank].send(Stop())
        except OSError:
            pass
        else:
            self._processes[rank].join(STOP_TIMEOUT_S)
        self.expel([rank])

    def close(self) -> None:
        """End every process; again does nothing."""
        for pipe in self._pipes.values():
            try:
                pipe.send(Stop())
            except OSError:
                continue
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
        self.expel(list(self._pipes))
        if self._room:
            self._room.close()

    def poll(self) -> None:
        """Take in what ranks said unasked."""
        for rank, pipe in self._pipes.items():
            try:
                while pipe.poll():
                    self._take(rank, pipe)
            except (EOFError, OSError):
                continue  # the next step will say so

    def _collect(
        self,
        ranks: Iterable[int],
        timeout_s: float | None,
        lost: Mapping[int, str] | None = None,
        *,
        frozen_counts: bool = True,
    ) -> dict[int, Any]:
        """Return one answer of each of `ranks`, or say who is lost."""
        waiting, answers = set(ranks), {}
        gone, failed = dict(lost or {}), {}
        deadline = time.monotonic() + timeout_s if timeout_s else None
        while waiting:
            for rank in self._ready(waiting):
                try:
                    answer = self._take(rank, self._pipes[rank])
                except (EOFError, OSError):
                    gone[rank] = self._obituary(rank)
                    waiting.discard(rank)
                    continue
                if answer is None:
                    continue
                waiting.discard(rank)
                if answer.error:
                    failed[rank] = answer.error
                else:
                    answers[rank] = answer.value
            if frozen_counts:
                for rank in self._frozen(waiting):
                    self._processes[rank].kill()  # so that whoever waits for it learns at once
                    gone[rank] = f"gave no sign of life for {self.config.heartbeat_timeout_s:g} s"
                    waiting.discard(rank)
            if deadline and waiting and time.monotonic() > deadline:
                gone.update(dict.fromkeys(waiting, f"did not start within {timeout_s:g} s"))
                waiting.clear()
        if gone or failed:
            raise RankLostError(gone, failed)
        return {rank: answers[rank] for rank in sorted(answers)}

    def _ready(self, ranks: set[int]) -> Iterator[int]:
        """Wait a moment and yield the ranks that said something or died."""
        pipes = {self._pipes[rank]: rank for rank in ranks}
        for pipe in wait(list(pipes), timeout=0.05):
            yield pipes[pipe]  # type: ignore[index]

    def _take(self, rank: int, pipe: Connection) -> Answer | None:
        """Read one thing a rank said; a staging's end is put aside."""
        said = pipe.recv()
        if isinstance(said, Staged):
            self.staged.append((rank, said))
            return None
        assert isinstance(said, Answer), f"rank {rank} said {said!r}"
        return said

    def _frozen(self, ranks: set[int]) -> list[int]:
        latest = time.monotonic() - self.config.heartbeat_timeout_s
        return [rank for rank in ranks if self._beats[rank] < latest]

    def _obituary(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(STOP_TIMEOUT_S)
        code = process.exitcode
        if code is None:
            return "closed its pipe"
        return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
