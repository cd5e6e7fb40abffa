"""One copy of every expert in this machine's memory, for when the rank that held it is gone.

The controller makes the room, a file without a name that lives in memory and goes with the last
process that has it open; each rank puts in what it loaded at its start and takes out what nobody
else can send. Costs the memory of all experts once, on whatever number of ranks; for ranks on GPUs
it is the copy in the host's memory. There is none where the system has no such files (other than
Linux), where less than twice the room is available, or for a model without experts: the checkpoint
is read then. Used by `engine.cluster.launch` and `engine.cluster.experts`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import EngineConfig, ModelConfig
from engine.exchange.migration import Pair

_ALIGNED = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """What is kept: L layers of E experts, each (2F, D) and (D, F)."""

    num_layers: int
    num_experts: int
    width: int
    """F"""
    depth: int
    """D"""
    dtype: torch.dtype

    @classmethod
    def of(cls, config: EngineConfig, model: ModelConfig) -> Shape:
        """Return the shape for an engine's model."""
        return cls(
            len(model.moe_layers),
            model.num_experts,
            model.moe_intermediate_size,
            model.hidden_size,
            getattr(torch, config.dtype),
        )

    @property
    def num_pairs(self) -> int:
        """Experts of all layers."""
        return self.num_layers * self.num_experts

    @property
    def flag_bytes(self) -> int:
        """Bytes before the first expert: one for each, which says whether it is there."""
        return -(-self.num_pairs // _ALIGNED) * _ALIGNED

    @property
    def pair_numbers(self) -> int:
        """Numbers of one expert."""
        return 3 * self.width * self.depth

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self.flag_bytes + self.num_pairs * self.pair_numbers * self.dtype.itemsize


class Room:
    """The file, held open by the controller for as long as there are ranks."""

    def __init__(self, num_bytes: int) -> None:
        """Make the file; it occupies what is written to it.

        Raises:
            OSError: there is no room.
        """
        self._fd: int | None = os.memfd_create("host copies of experts")
        try:
            os.ftruncate(self._fd, num_bytes)
        except OSError:
            self.close()
            raise

    @property
    def path(self) -> str:
        """Where other processes of this user find it."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        """Let go of it; again does nothing."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def room_for(config: EngineConfig, model: ModelConfig) -> Room | None:
    """Make room for a copy of every expert; None where there can be none."""
    size = Shape.of(config, model).num_bytes if model.is_moe else 0
    if not config.host_copies or not size or not hasattr(os, "memfd_create"):
        return None
    try:
        return Room(size) if 2 * size <= available_bytes() else None
    except OSError:
        return None


class HostCopies:
    """The copies, as one rank sees them."""

    def __init__(self, path: str, shape: Shape) -> None:
        """Map the file."""
        raw = torch.from_file(path, shared=True, size=shape.num_bytes, dtype=torch.uint8)
        self._shape = shape
        self._there = raw[: shape.num_pairs]
        self._pairs = raw[shape.flag_bytes :].view(shape.dtype).view(shape.num_pairs, -1)

    def put(self, layer: int, expert: int, pair: Pair) -> None:
        """Keep an expert that is not there yet."""
        at = self._at(layer, expert)
        if self._there[at]:
            return
        for kept, part in zip(self._parts(at), pair, strict=True):
            kept.copy_(part)
        self._there[at] = 1  # last, so that half an expert is never taken for a whole one

    def get(self, layer: int, expert: int) -> Pair | None:
        """Return views of an expert, not to be changed; None if it is not there."""
        at = self._at(layer, expert)
        return self._parts(at) if self._there[at] else None

    def _at(self, layer: int, expert: int) -> int:
        return layer * self._shape.num_experts + expert

    def _parts(self, at: int) -> tuple[Tensor, Tensor]:
        width, depth = self._shape.width, self._shape.depth
        numbers, size = self._pairs[at], 2 * width * depth
        return numbers[:size].view(2 * width, depth), numbers[size:].view(depth, width)


def available_bytes() -> int:
    """Return the memory new processes could have, as Linux estimates it; 0 where it does not."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            found = next(line for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 0
    return int(found.split()[1]) * 1024
