"""Machines on paper: ranks, nodes, links and compute, and how long a transfer takes on them.

A topology is a JSON file in which every figure carries its source. The model answers where times
are not measured; what comes from it is labelled `modelled`. It knows peak figures only, so it is a
lower bound: no protocol overhead, no congestion inside a switch, no noise.

The formula. Every rank has a port on the link inside its node and one on the link between nodes;
both are full duplex. A port carries its packets one after another, and all ports of a node share
the node's bandwidth:

    port = messages * latency_us + bytes / bandwidth_gbs         each rank, link and direction
    node = bytes / node_gbs                                      each node, link and direction
    all-to-all = start_us + the longest of these                 0 when nothing is sent

It has the form of the cost model in NCCL's tuner (a base, a latency per step, bytes by bandwidth).
Used by the modelled exchange, by plans for moving experts, and by the benchmarks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from engine.config import MAX_DEVICES, at_least, from_mapping, within
from engine.errors import ConfigError, nearest

Float = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

BYTES_PER_US = 1e3
"""Bytes that 1 GB/s moves in a microsecond."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One kind of connection: the same for every rank that has a port on it."""

    name: str
    bandwidth_gbs: float
    """Of one rank's port, in each direction."""
    node_gbs: float
    """Of all ports of one node together, in each direction."""
    latency_us: float
    """For which one message keeps its port, whatever its size."""
    sources: Mapping[str, str]
    """Where each figure comes from."""

    def __post_init__(self) -> None:
        _check_figures(self, "bandwidth_gbs", "node_gbs", "latency_us")
        if self.node_gbs < self.bandwidth_gbs:
            raise ConfigError(
                f"node_gbs ({self.node_gbs}) of {self.name} must be at least bandwidth_gbs "
                f"({self.bandwidth_gbs}), what one of the node's ports can carry."
            )

    def port_us(self, num_bytes: Any, messages: Any) -> Any:
        """Return how long a port is busy with so many bytes in so many messages."""
        return messages * self.latency_us + num_bytes / (self.bandwidth_gbs * BYTES_PER_US)


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """What one rank computes with."""

    name: str
    tflops: float
    """Dense products at peak, in the format the source names."""
    memory_gbs: float
    memory_gb: float
    """10^9 bytes, as data sheets count."""
    sources: Mapping[str, str]

    def __post_init__(self) -> None:
        _check_figures(self, "tflops", "memory_gbs", "memory_gb")

    def time_us(self, flops: float, num_bytes: float) -> float:
        """Return the time of an operation by the roofline: the longer of computing and reading.

        10^9 operations and 10^6 bytes at 1000 TFLOPS and 1000 GB/s take max(1, 1) = 1 us.
        """
        return max(flops / (self.tflops * 1e6), num_bytes / (self.memory_gbs * BYTES_PER_US))


@dataclass(frozen=True, slots=True)
class Transfer:
    """How long an exchange takes, and what it waits for."""

    us: float
    bottleneck: str
    """In words, such as `rank 3 sends over NVLink`; `nothing is sent` for an empty exchange."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """G ranks in nodes of equal size, filled in order."""

    name: str
    num_ranks: int
    ranks_per_node: int
    start_us: float
    """Once for each exchange: to launch it, before the first byte moves."""
    compute: Compute
    inside: Link
    """Between ranks of one node."""
    between: Link | None = None
    """Between ranks of different nodes; needed from two nodes on."""
    sources: Mapping[str, str]

    def __post_init__(self) -> None:
        within("num_ranks", self.num_ranks, 1, MAX_DEVICES)
        at_least("ranks_per_node", self.ranks_per_node, 1)
        _check_figures(self, "start_us")
        if self.num_nodes > 1 and self.between is None:
            raise ConfigError(
                f"topology {self.name} has {self.num_nodes} nodes; it needs a link 'between' them."
            )

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a topology file.

        Raises:
            ConfigError: it is missing, is not a JSON object, has an unknown key (the nearest known
                one is named), lacks a figure or a figure's source.
        """
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except OSError as wrong:
            raise ConfigError(
                f"topology file {path} cannot be read: {wrong.strerror}; name a file such as those "
                "in data/hardware."
            ) from None
        except ValueError as wrong:
            raise ConfigError(f"topology file {path} is not JSON: {wrong}.") from None
        try:
            return cls.from_mapping(raw)
        except ConfigError as wrong:
            raise ConfigError(f"topology file {path}: {wrong}") from None

    @classmethod
    def from_mapping(cls, raw: Any) -> Self:
        """Build a topology from the contents of its file.

        Raises:
            ConfigError: as `read`.
        """
        values = dict(_object("the topology", raw))
        parts: tuple[tuple[str, type], ...] = (
            ("compute", Compute),
            ("inside", Link),
            ("between", Link),
        )
        for key, part in parts:
            if values.get(key) is not None:
                values[key] = from_mapping(part, _object(key, values[key]))
        return from_mapping(cls, values)

    @property
    def num_nodes(self) -> int:
        """Nodes that hold a rank; the last may be part full."""
        return -(-self.num_ranks // self.ranks_per_node)

    @property
    def node_of_rank(self) -> Counts:
        """(G,) the node of each rank."""
        return np.arange(self.num_ranks) // self.ranks_per_node

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node."""
        every = range(self.num_ranks)
        return tuple(
            tuple(every[first : first + self.ranks_per_node])
            for first in range(0, self.num_ranks, self.ranks_per_node)
        )

    def for_ranks(self, num_ranks: int) -> Self:
        """Return the same machine with only its first ranks in use.

        Raises:
            ConfigError: it has fewer.
        """
        if not 1 <= num_ranks <= self.num_ranks:
            raise ConfigError(
                f"topology {self.name} has ranks for 1 to {self.num_ranks} processes, not "
                f"{num_ranks}; take fewer or another topology."
            )
        return replace(self, num_ranks=num_ranks)

    def packet_us(self, source: int, target: int, num_bytes: int) -> float:
        """Return the time of one packet alone on the wires; 0 within a rank.

        1 MB over a port of 100 GB/s at 2 us a message and 8 us to start: 8 + 2 + 10 = 20 us.
        """
        if source == target:
            return 0.0
        nodes = self.node_of_rank
        link = self.inside if nodes[source] == nodes[target] else self.between
        assert link is not None, "checked when the topology was made"
        return self.start_us + float(link.port_us(num_bytes, 1))

    def pairs_us(self, bytes_GG: Counts, messages_GG: Counts) -> Float:
        """Return (G, G) the time each pair's packets keep a port, from source to destination.

        Without `start_us`, and as if no other pair used the port; the diagonal is 0.
        """
        self._check_exchange(bytes_GG, messages_GG)
        times_GG = np.zeros(bytes_GG.shape)
        for link, used_GG in self._routes():
            times_GG += np.where(used_GG, link.port_us(bytes_GG, messages_GG), 0.0)
        return times_GG

    def all_to_all(self, bytes_GG: Counts, messages_GG: Counts) -> Transfer:
        """Return the time of an exchange in which every rank may send to every other.

        Args:
            bytes_GG: (G, G) from source to destination; the diagonal stays at home and is free.
            messages_GG: (G, G) in how many packets; 0 where there are no bytes, or where an empty
                packet is not sent either.

        Raises:
            ConfigError: a shape does not fit, a count is negative, or bytes go in no message.
        """
        self._check_exchange(bytes_GG, messages_GG)
        busy = [(0.0, "nothing is sent")]
        for link, used_GG in self._routes():
            sent_GG, count_GG = np.where(used_GG, bytes_GG, 0), np.where(used_GG, messages_GG, 0)
            for axis, verb in ((1, "sends"), (0, "receives")):
                bytes_G, count_G = sent_GG.sum(axis), count_GG.sum(axis)
                ports_G = link.port_us(bytes_G, count_G)
                bytes_N = np.bincount(self.node_of_rank, weights=bytes_G)
                nodes_N = bytes_N / (link.node_gbs * BYTES_PER_US)
                for what, times in (("rank", ports_G), ("node", nodes_N)):
                    worst = int(times.argmax())
                    busy.append((float(times[worst]), f"{what} {worst} {verb} over {link.name}"))
        longest, bottleneck = max(busy, key=lambda item: item[0])
        return Transfer(self.start_us + longest if longest else 0.0, bottleneck)

    def _routes(self) -> Iterator[tuple[Link, npt.NDArray[np.bool_]]]:
        """Yield each link with the (G, G) pairs that use it."""
        nodes = self.node_of_rank
        together_GG = nodes[:, None] == nodes
        yield self.inside, together_GG & ~np.eye(self.num_ranks, dtype=bool)
        if self.between is not None:
            yield self.between, ~together_GG

    def _check_exchange(self, bytes_GG: Counts, messages_GG: Counts) -> None:
        wanted = (self.num_ranks, self.num_ranks)
        for name, array in (("bytes_GG", bytes_GG), ("messages_GG", messages_GG)):
            if array.shape != wanted or (array < 0).any():
                raise ConfigError(
                    f"{name} {array.shape} must hold counts of 0 or more for {wanted} pairs of "
                    f"the topology {self.name}."
                )
        silent = (bytes_GG > 0) & (messages_GG == 0) & ~np.eye(self.num_ranks, dtype=bool)
        if silent.any():
            source, target = np.argwhere(silent)[0]
            raise ConfigError(
                f"{bytes_GG[source, target]} bytes go from rank {source} to rank {target} in no "
                "message; count at least one."
            )


def _object(name: str, raw: Any) -> Mapping[str, Any]:
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{name} ({raw!r}) must be a JSON object.")
    return raw


def _check_figures(part: Any, *names: str) -> None:
    """Refuse a figure that is not a number above 0, or that has no source; and a stray source."""
    kind = type(part).__name__
    for name in names:
        value = getattr(part, name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            raise ConfigError(f"{name} ({value!r}) of {kind} must be a number above 0.")
    sources = _object(f"sources of {kind}", part.sources)
    for key in sources:
        if key not in names:
            known = [f.name for f in fields(part)]
            raise ConfigError(f"sources of {kind} name no figure {key!r}{nearest(key, known)}")
    for name in names:
        if not isinstance(sources.get(name), str) or not sources[name].strip():
            raise ConfigError(f"{name} of {kind} has no source; say in 'sources' where it is from.")
