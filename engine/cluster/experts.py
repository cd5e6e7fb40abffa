"""The experts one rank holds: which ones, and all the state of each, swapped as one.

A table to come is *staged*: its experts are gathered beside those in use, from this rank's own
memory where it has them and from the checkpoint where not. *Publishing* swaps table and weights by
reference between two steps. Used by `engine.cluster.worker`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.checkpoint.load import Assignment, assignments
from engine.config import EngineConfig, ModelConfig
from engine.errors import RankError
from engine.faults import Faults
from engine.kernels.experts import ExpertWeights
from engine.model.moe import Experts
from engine.model.transformer import Transformer
from engine.routing.table import RoutingTable

_TARGET = re.compile(r"layers\.(\d+)\.moe\.experts\.(gate_up|down)$")

Held = list[list[int]]
"""By layer: the logical expert in each of the rank's slots."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """A table and the experts this rank needs under it."""

    table: RoutingTable
    held: Held
    layers: list[ExpertWeights]


class ExpertStore:
    """Keeps one rank's experts in step with the routing table."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        me: int,
        table: RoutingTable,
        faults: Faults,
    ) -> None:
        self._config, self._model_config, self._me, self._faults = config, model, me, faults
        self._table, self._held = table, held_by(table, me)
        self._modules: list[Experts] = []
        self._staged: dict[int, Gathered] = {}
        self._lock = threading.Lock()

    @property
    def num_slots(self) -> int:
        """Experts of one layer on this rank."""
        return len(self._held[0]) if self._held else 0

    def parts(self, item: Assignment) -> Iterator[tuple[tuple[int | slice, ...], Tensor]]:
        """Yield where a tensor of the files goes on this rank, and what of it.

        Experts of other ranks go nowhere; one held twice goes to both of its slots.
        """
        found = _TARGET.match(item.target)
        if found is None:
            yield item.index, item.tensor
            return
        which, rest = (item.index[0], item.index[1:]) if item.index else (slice(None), ())
        for slot, expert in enumerate(self._held[int(found[1])]):
            if isinstance(which, slice):
                yield (slot, *rest), item.tensor[expert]
            elif which == expert:
                yield (slot, *rest), item.tensor

    def attach(self, model: Transformer) -> None:
        """Keep the experts of `model`, which was loaded through `parts`."""
        self._modules = [module for module in model.modules() if isinstance(module, Experts)]

    def stage(self, table: RoutingTable) -> int:
        """Gather the experts of a table to come; returns the bytes read from the checkpoint.

        May run in another thread while steps run.

        Raises:
            CheckpointError: the model folder is no longer readable.
        """
        with self._lock:
            if table.version == self._table.version:
                return 0
            have = list(self._held)
            now = [module.weights for module in self._modules]
        if (fault := self._faults.table_stage) is not None:
            table = fault(table)
        held = held_by(table, self._me)
        fetched = self._fetch(held, have)
        layers = []
        for layer, wanted in enumerate(held):
            of_layer = {expert: pair for (index, expert), pair in fetched.items() if index == layer}
            stacks = _gather(wanted, have[layer], now[layer], of_layer)
            layers.append(self._modules[layer].others(*stacks))
        with self._lock:
            self._staged[table.version] = Gathered(table, held, layers)
        return sum(part.numel() * part.element_size() for pair in fetched.values() for part in pair)

    def publish(self, version: int) -> RoutingTable:
        """Put a staged table and its experts in force; between steps only.

        Raises:
            RankError: that version was never staged.
        """
        with self._lock:
            if version == self._table.version:
                return self._table
            if version not in self._staged:
                raise RankError(
                    f"rank {self._me} has not staged table version {version}; staged are "
                    f"{sorted(self._staged) or 'none'}."
                )
            gathered = self._staged.pop(version)
            for module, experts in zip(self._modules, gathered.layers, strict=True):
                module.replace(experts)
            self._table, self._held = gathered.table, gathered.held
            self._staged = {v: one for v, one in self._staged.items() if v > version}
            return self._table

    def _fetch(self, held: Held, have: Held) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
        """Read the experts this rank does not have yet from the checkpoint."""
        missing = {
            (layer, expert)
            for layer, wanted in enumerate(held)
            for expert in wanted
            if expert not in have[layer]
        }
        if not missing:
            return {}
        config = self._model_config
        width, depth = config.moe_intermediate_size, config.hidden_size
        dtype = getattr(torch, self._config.dtype)
        found = {
            key: (
                torch.full((2 * width, depth), torch.nan, dtype=dtype),
                torch.full((depth, width), torch.nan, dtype=dtype),
            )
            for key in missing
        }
        layers = {layer for layer, _ in missing}

        def wanted(target: str) -> bool:
            match = _TARGET.match(target)
            return match is not None and int(match[1]) in layers

        for item in assignments(self._config.model, config, hashes=False, wanted=wanted):
            match = _TARGET.match(item.target)
            assert match is not None, item.target
            which, rest = (item.index[0], item.index[1:]) if item.index else (slice(None), ())
            for layer, expert in missing:
                if layer != int(match[1]) or which not in (expert, slice(None)):
                    continue
                tensor = item.tensor[expert] if isinstance(which, slice) else item.tensor
                found[layer, expert][match[2] == "down"][rest].copy_(tensor)
        return found


def held_by(table: RoutingTable, rank: int) -> Held:
    """Return by layer the logical experts in the slots of `rank`.

    ``phy2log = [[0, 1, 2, 0]]`` with owners ``[0, 0, 1, 1]`` gives rank 1 ``[[2, 0]]``.
    """
    mine = np.flatnonzero(table.rank_of_phy == rank)
    held: Held = table.phy2log[:, mine].tolist()
    return held


def _gather(
    wanted: list[int],
    have: list[int],
    now: ExpertWeights,
    fetched: Mapping[int, tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Stack one layer's wanted experts: those at hand copied, the others as fetched."""
    gate_up = now.gate_up.new_empty(len(wanted), *now.gate_up.shape[1:])
    down = now.down.new_empty(len(wanted), *now.down.shape[1:])
    for slot, expert in enumerate(wanted):
        if expert in have:
            at = have.index(expert)
            gate_up[slot], down[slot] = now.gate_up[at], now.down[at]
        else:
            gate_up[slot], down[slot] = fetched[expert]
    return gate_up, down
