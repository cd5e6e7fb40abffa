"""The experts one rank holds: which ones, and all the state of each, swapped as one.

A table to come is *staged*: its experts are gathered beside those in use, from this rank's own
memory where it has them, from the ranks that hold them, and where nobody is left who does from the
host's copy, or, without one, from the checkpoint. *Publishing* swaps table and weights by reference
between two steps; until the next ordinary step it can be *retracted*. Used by
`engine.cluster.worker`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.checkpoint.load import Assignment, assignments
from engine.cluster.devices import device_of
from engine.cluster.host_copies import HostCopies
from engine.config import EngineConfig, ModelConfig
from engine.errors import RankError
from engine.exchange.group import Group
from engine.exchange.migration import Key, Pair, carry
from engine.exchange.plan import Move
from engine.faults import Faults
from engine.kernels.experts import ExpertWeights
from engine.model.moe import Experts
from engine.model.transformer import Transformer
from engine.routing.table import RoutingTable

_TARGET = re.compile(r"layers\.(\d+)\.moe\.experts\.(gate_up|down)$")

Held = list[list[int]]
"""By layer: the logical expert in each of the rank's slots."""


@dataclass(frozen=True, slots=True)
class Holding:
    """A table and the experts this rank has under it."""

    table: RoutingTable
    held: Held
    layers: list[ExpertWeights]

    def give(self, layer: int, expert: int) -> Pair:
        """Return one expert.

        Raises:
            RankError: it is not held.
        """
        if expert not in self.held[layer]:
            raise RankError(
                f"expert {expert} of layer {layer} was asked of a rank that holds "
                f"{self.held[layer]} under table version {self.table.version}."
            )
        slot = self.held[layer].index(expert)
        return self.layers[layer].gate_up[slot], self.layers[layer].down[slot]


@dataclass(frozen=True, slots=True)
class Gathered:
    """What was fetched for a table, in bytes."""

    from_ranks: int = 0
    from_host: int = 0
    from_checkpoint: int = 0


class ExpertStore:
    """Keeps one rank's experts in step with the routing table."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        me: int,
        table: RoutingTable,
        faults: Faults,
        copies: HostCopies | None = None,
    ) -> None:
        self._copies = copies
        self._config, self._model_config, self._me, self._faults = config, model, me, faults
        self._modules: list[Experts] = []
        self._now = Holding(table, held_by(table, me), [])
        self._before: Holding | None = None
        """What was in force before the last table, until that has proved itself."""
        self._staged: dict[int, Holding] = {}
        self._lock = threading.Lock()

    @property
    def table(self) -> RoutingTable:
        """The table in force."""
        return self._now.table

    @property
    def num_slots(self) -> int:
        """Experts of one layer on this rank."""
        return len(self._now.held[0]) if self._now.held else 0

    def parts(self, item: Assignment) -> Iterator[tuple[tuple[int | slice, ...], Tensor]]:
        """Yield where a tensor of the files goes on this rank, and what of it.

        Experts of other ranks go nowhere; one held twice goes to both of its slots.
        """
        found = _TARGET.match(item.target)
        if found is None:
            yield item.index, item.tensor
            return
        which, rest = (item.index[0], item.index[1:]) if item.index else (slice(None), ())
        for slot, expert in enumerate(self._now.held[int(found[1])]):
            if isinstance(which, slice):
                yield (slot, *rest), item.tensor[expert]
            elif which == expert:
                yield (slot, *rest), item.tensor

    def attach(self, model: Transformer) -> None:
        """Keep the experts of `model`, which was loaded through `parts`."""
        self._modules = [module for module in model.modules() if isinstance(module, Experts)]
        layers = [module.weights for module in self._modules]
        self._now = now = Holding(self._now.table, self._now.held, layers)
        if self._copies is not None:
            for layer, held in enumerate(now.held):
                for expert in {*held} - {-1}:
                    self._copies.put(layer, expert, now.give(layer, expert))

    def stage(
        self, number: int, table: RoutingTable, moves: Sequence[Move], meet: Callable[[], Group]
    ) -> Gathered:
        """Gather the experts of a table to come; may run in another thread while steps run.

        Args:
            number: of this staging, for `publish`.
            table: the table to come.
            moves: what travels between ranks for it; the same on all of them.
            meet: returns the group of those that send or receive; called if this rank does.

        Raises:
            CheckpointError: the model folder is no longer readable.
            ExchangeError: a rank died or did not answer in time.
        """
        now = self._now
        if (fault := self._faults.table_stage) is not None:
            table = fault(table)
        arrived: dict[Key, Pair] = {}
        if any(self._me in (move.source, move.target) for move in moves if move.source >= 0):
            group = meet()
            try:
                arrived = carry(moves, group, now.give, self._blank)
                group.meet(f"the end of staging {number}")
            finally:
                group.close()
        gathered, holding = self._gather(table, now, arrived)
        with self._lock:
            self._staged[number] = holding
        return gathered

    def publish(self, number: int) -> None:
        """Put a staged table and its experts in force; between steps only.

        Raises:
            RankError: that staging never ended.
        """
        with self._lock:
            if number not in self._staged:
                raise RankError(
                    f"rank {self._me} has not staged table {number}; staged are "
                    f"{sorted(self._staged) or 'none'}."
                )
            holding = self._staged.pop(number)
            self._staged = {n: one for n, one in self._staged.items() if n > number}
        self._install(holding)

    def join(self, table: RoutingTable, now: int, moves: Sequence[Move], group: Group) -> Gathered:
        """Hold the experts of `table` at once, as all ranks of a new group do together.

        Args:
            table: of the new group.
            now: version of the table from which `moves` start.
            moves: what travels between ranks.
            group: the new group.

        Raises:
            CheckpointError: the model folder is no longer readable.
            ExchangeError: a rank died or did not answer in time.
        """
        self.retract(now)
        arrived = carry(moves, group, self._now.give, self._blank)
        if table.version == self.table.version:
            return Gathered()
        gathered, holding = self._gather(table, self._now, arrived)
        self._install(holding)
        return gathered

    def retract(self, version: int) -> None:
        """Go back to the table before, if this rank has gone beyond `version`.

        Raises:
            RankError: the table of that version is no longer at hand.
        """
        if self.table.version == version:
            return
        if self._before is None or self._before.table.version != version:
            raise RankError(
                f"rank {self._me} holds table version {self.table.version} and cannot go back to "
                f"version {version}."
            )
        self._install(self._before)
        self._before = None

    def settle(self) -> None:
        """Let go of what was in force before: the table has proved itself."""
        self._before = None

    def _install(self, holding: Holding) -> None:
        for module, experts in zip(self._modules, holding.layers, strict=True):
            module.replace(experts)
        self._before, self._now = self._now, holding

    def _gather(
        self, table: RoutingTable, now: Holding, arrived: Mapping[Key, Pair]
    ) -> tuple[Gathered, Holding]:
        """Stack the experts of `table`: those at hand, those that came, the host's, the files'."""
        held = held_by(table, self._me)
        missing = {
            (layer, expert)
            for layer, wanted in enumerate(held)
            for expert in wanted
            if expert >= 0 and expert not in now.held[layer] and (layer, expert) not in arrived
        }
        copied = self._copied(missing)
        fetched = self._fetch(missing - copied.keys()) if missing - copied.keys() else {}
        layers = []
        for layer, wanted in enumerate(held):
            others = {
                e: p for (at, e), p in (copied | fetched | {**arrived}).items() if at == layer
            }
            stacks = _stacked(wanted, now.held[layer], now.layers[layer], others)
            layers.append(self._modules[layer].others(*stacks))
        sizes = Gathered(_size(arrived), _size(copied), _size(fetched))
        return sizes, Holding(table, held, layers)

    def _copied(self, missing: Collection[Key]) -> dict[Key, Pair]:
        """Return those that the host has a copy of."""
        if self._copies is None:
            return {}
        found = {key: self._copies.get(*key) for key in missing}
        return {key: pair for key, pair in found.items() if pair is not None}

    def _fetch(self, missing: Collection[Key]) -> dict[Key, Pair]:
        """Read experts from the checkpoint."""
        found = {key: self._blank() for key in missing}
        layers = {layer for layer, _ in missing}

        def wanted(target: str) -> bool:
            match = _TARGET.match(target)
            return match is not None and int(match[1]) in layers

        model, folder = self._model_config, self._config.model
        for item in assignments(folder, model, hashes=False, wanted=wanted):
            match = _TARGET.match(item.target)
            assert match is not None, item.target
            which, rest = (item.index[0], item.index[1:]) if item.index else (slice(None), ())
            for layer, expert in missing:
                if layer != int(match[1]) or which not in (expert, slice(None)):
                    continue
                tensor = item.tensor[expert] if isinstance(which, slice) else item.tensor
                found[layer, expert][match[2] == "down"][rest].copy_(tensor)
        return found

    def _blank(self) -> Pair:
        """Return room for one expert, NaN so that what is never filled shows."""
        width, depth = self._model_config.moe_intermediate_size, self._model_config.hidden_size
        dtype, device = getattr(torch, self._config.dtype), device_of(self._config, self._me)
        return (
            torch.full((2 * width, depth), torch.nan, dtype=dtype, device=device),
            torch.full((depth, width), torch.nan, dtype=dtype, device=device),
        )


def held_by(table: RoutingTable, rank: int) -> Held:
    """Return by layer the logical experts in the slots of `rank`.

    ``phy2log = [[0, 1, 2, 0]]`` with owners ``[0, 0, 1, 1]`` gives rank 1 ``[[2, 0]]``.
    """
    mine = np.flatnonzero(table.rank_of_phy == rank)
    held: Held = table.phy2log[:, mine].tolist()
    return held


def _stacked(
    wanted: list[int],
    have: list[int],
    now: ExpertWeights,
    fetched: Mapping[int, tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Stack one layer's wanted experts: those at hand copied, the others as fetched, -1 zero."""
    gate_up = now.gate_up.new_empty(len(wanted), *now.gate_up.shape[1:])
    down = now.down.new_empty(len(wanted), *now.down.shape[1:])
    for slot, expert in enumerate(wanted):
        if expert < 0:
            gate_up[slot], down[slot] = 0, 0
        elif expert in have:
            at = have.index(expert)
            gate_up[slot], down[slot] = now.gate_up[at], now.down[at]
        else:
            gate_up[slot], down[slot] = fetched[expert]
    return gate_up, down


def _size(experts: Mapping[Key, Pair]) -> int:
    return sum(part.numel() * part.element_size() for pair in experts.values() for part in pair)
