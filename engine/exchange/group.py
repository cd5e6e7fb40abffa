"""A group of ranks that exchange tensors: Gloo on CPUs, NCCL on GPUs.

A group belongs to one epoch. When a member dies the group is thrown away and a new one is made of
the survivors from the controller's store; nothing here outlives an epoch. Every wait is bounded and
ends in an `ExchangeError` that names what was waited for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engine.errors import ExchangeError

CPU = torch.device("cpu")


class Group:
    """The exchange of one epoch, seen by one member."""

    def __init__(
        self,
        store: Any,
        epoch: int,
        members: Sequence[int],
        me: int,
        timeout_s: float,
        *,
        name: str = "exchange",
        device: torch.device = CPU,
    ) -> None:
        """Join; returns when all members have.

        Args:
            store: the controller's `torch.distributed` store.
            epoch: number of this group; every epoch has keys of its own in the store.
            members: device ids, ascending; the same on every member.
            me: which of them this is.
            timeout_s: the longest wait of any operation, seconds.
            name: tells groups of one epoch apart.
            device: on which the rows lie; decides what carries them, see `backend_of`.

        Raises:
            ExchangeError: not all members came in time.
        """
        self.epoch, self.members, self.me = epoch, tuple(members), me
        self.index, self.timeout_s, self.device = self.members.index(me), timeout_s, device
        self.backend = backend_of(device)
        keys = dist.PrefixStore(f"{name}/{epoch}", store)  # type: ignore[attr-defined]
        wait = timedelta(seconds=timeout_s)
        try:
            if self.backend == "nccl":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = wait
                self._pg: Any = dist.ProcessGroupNCCL(keys, self.index, self.size, options)
            else:
                self._pg = dist.ProcessGroupGloo(keys, self.index, self.size, wait)
        except RuntimeError as failed:
            raise ExchangeError(
                f"rank {me} could not join the {name} group of epoch {epoch} with ranks "
                f"{list(members)} within {timeout_s:g} s: {_first_line(failed)}"
            ) from failed

    @property
    def size(self) -> int:
        """How many ranks take part."""
        return len(self.members)

    def all_to_all(
        self, send: Tensor, send_rows: Sequence[int], receive_rows: Sequence[int], what: str
    ) -> Arrival:
        """Start to send rows to every member and to receive from every member.

        Args:
            send: (S, …) rows ordered by destination member.
            send_rows: rows for each member, in the members' order; they sum to S.
            receive_rows: rows from each member; what they call `send_rows` for this one.
            what: named in the error if it does not finish.

        Returns:
            what `wait` of turns into the (sum of receive_rows, …) rows ordered by source member.
        """
        out = send.new_empty(sum(receive_rows), *send.shape[1:])
        started = time.perf_counter()
        try:
            work = self._pg.alltoall_base(
                out, send.contiguous(), list(receive_rows), list(send_rows)
            )
        except RuntimeError as failed:
            raise self._error(what, started, failed) from failed
        return Arrival(self, [work], out, what, started)

    def send_each(
        self,
        send: Tensor,
        send_rows: Sequence[int],
        receive_rows: Sequence[int],
        what: str,
    ) -> Arrival:
        """Do what `all_to_all` does with one message per row; own rows are copied.

        The baseline every grouped exchange is measured against.
        """
        out = send.new_empty(sum(receive_rows), *send.shape[1:])
        started = time.perf_counter()
        works: list[Any] = []
        one_launch = self.backend == "nccl"  # or NCCL's sends and receives wait for each other
        try:
            if one_launch:
                self._pg._start_coalescing(self.device)
            for peer, rows in _spans(receive_rows):
                if peer != self.index:
                    works += [self._pg.recv([out[row]], peer, tag) for tag, row in enumerate(rows)]
            for peer, rows in _spans(send_rows):
                if peer != self.index:
                    works += [self._pg.send([send[row]], peer, tag) for tag, row in enumerate(rows)]
            if one_launch:
                works = [self._pg._end_coalescing(self.device)]
        except RuntimeError as failed:
            raise self._error(what, started, failed) from failed
        own_from, own_to = (list(_spans(rows))[self.index][1] for rows in (send_rows, receive_rows))
        out[own_to.start : own_to.stop] = send[own_from.start : own_from.stop]
        return Arrival(self, works, out, what, started)

    def send_to(self, tensor: Tensor, member: int, tag: int, what: str) -> None:
        """Send one tensor to a member and wait until it is taken."""
        self._point_to_point(self._pg.send, tensor, member, tag, what)

    def receive_from(self, tensor: Tensor, member: int, tag: int, what: str) -> None:
        """Fill `tensor` from a member."""
        self._point_to_point(self._pg.recv, tensor, member, tag, what)

    def meet(self, what: str) -> None:
        """Wait until all members have come here."""
        one = [1] * self.size
        zeros = torch.zeros(self.size, 1, device=self.device)
        self.all_to_all(zeros, one, one, what).wait().tolist()  # the host waits too

    def close(self) -> None:
        """Leave at once; whoever still waits for this member gets an error."""
        self._pg.abort()
        self._pg = None

    def _point_to_point(self, do: Any, tensor: Tensor, member: int, tag: int, what: str) -> None:
        started = time.perf_counter()
        try:
            self.wait_for(do([tensor], self.members.index(member), tag))
        except RuntimeError as failed:
            raise self._error(what, started, failed) from failed

    def wait_for(self, work: Any) -> None:
        """Wait for one operation: the host on CPUs, the stream that computes on GPUs.

        A GPU's host goes on; if a member dies, NCCL's watchdog ends the operation after the
        group's time-out.
        """
        if self.backend == "nccl":
            work.wait()
        else:
            work.wait(timedelta(seconds=self.timeout_s))

    def _error(self, what: str, started: float, failed: BaseException) -> ExchangeError:
        return ExchangeError(
            f"rank {self.me}: {what} among ranks {list(self.members)} (epoch {self.epoch}) failed "
            f"after {time.perf_counter() - started:.2f} s of at most {self.timeout_s:g} s: "
            f"{_first_line(failed)}"
        )


class Arrival:
    """Rows under way."""

    __slots__ = ("_group", "_out", "_started", "_wait_s", "_what", "_works")

    def __init__(
        self, group: Group, works: list[Any], out: Tensor, what: str, started: float
    ) -> None:
        self._group, self._works, self._out = group, works, out
        self._what, self._started = what, started
        self._wait_s = 0.0

    def wait(self) -> Tensor:
        """Return the rows once all have come.

        Raises:
            ExchangeError: a member died, or did not answer in time.
        """
        began = time.perf_counter()
        try:
            for work in self._works:
                self._group.wait_for(work)
        except RuntimeError as failed:
            raise self._group._error(self._what, self._started, failed) from failed
        self._wait_s += time.perf_counter() - began
        self._works = []
        return self._out

    def take_wait_s(self) -> float:
        """Return the seconds spent in `wait` since the last call of this."""
        waited, self._wait_s = self._wait_s, 0.0
        return waited


def backend_of(device: torch.device) -> str:
    """Return what carries rows that lie on `device`: `nccl` for GPUs, `gloo` for all else."""
    return "nccl" if device.type == "cuda" else "gloo"


def _spans(rows: Sequence[int]) -> list[tuple[int, range]]:
    """Return (member, its rows): counts ``[2, 0, 1]`` give rows 0-1, none, and 2."""
    spans, start = [], 0
    for member, count in enumerate(rows):
        spans.append((member, range(start, start + count)))
        start += count
    return spans


def _first_line(failed: BaseException) -> str:
    text = str(failed).splitlines()[0] if str(failed) else type(failed).__name__
    return text.rsplit("] ", 1)[-1]


def host_store(port: int = 0) -> Any:
    """Open the store of a controller; members reach it with `join_store(store.port)`."""
    return _TCP_STORE("127.0.0.1", port, is_master=True, wait_for_workers=False)


def join_store(port: int, timeout_s: float) -> Any:
    """Reach the controller's store."""
    wait = timedelta(seconds=timeout_s)
    return _TCP_STORE("127.0.0.1", port, is_master=False, timeout=wait)


_TCP_STORE: Any = dist.TCPStore  # type: ignore[attr-defined]
