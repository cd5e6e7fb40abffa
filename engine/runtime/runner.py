"""Turn a schedule into one forward pass and its results.

`run` reads as the step does: lay out the batch, run the layers, sample. Deciding who runs is the
scheduler's, what the results mean to a request is the engine's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.config import EngineConfig, ModelConfig
from engine.faults import Faults
from engine.kernels.attention import Segment, plan_attention
from engine.model.kv_cache import KVCache
from engine.model.sampler import sample
from engine.model.step import HostRows, StageClock, StepContext
from engine.model.transformer import Transformer
from engine.routing.policy import LayerPolicy
from engine.routing.smoothing import Smoother
from engine.routing.table import RoutingTable
from engine.runtime.scheduler import Chunk, Schedule


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one forward pass brought."""

    step: StepContext
    sampled: list[tuple[Chunk, int]]
    """The chunks that reached their sequence's end, with the next token of each."""
    logits_BV: Tensor
    """(B, V) fp32, a row for each of `sampled`."""


class Runner:
    """Owns the model and its cache; runs one schedule at a time."""

    def __init__(
        self, model: Transformer, model_config: ModelConfig, config: EngineConfig, faults: Faults
    ) -> None:
        self.model, self.config, self.faults = model, config, faults
        self.cache = KVCache(
            model_config.num_layers,
            config.num_blocks,
            config.block_size,
            model_config.num_kv_heads,
            model_config.head_dim,
            getattr(torch, config.dtype),
        )

    def run(
        self,
        schedule: Schedule,
        table: RoutingTable,
        policies: tuple[LayerPolicy | None, ...],
        clock: StageClock,
        *,
        record: bool,
        smoothing: float = 0.0,
    ) -> StepResult:
        """Run the chunks of `schedule` under one table and one policy."""
        self.cache.clear(schedule.fresh_blocks)
        step = self._lay_out(schedule.chunks, table, policies, clock, record)
        if smoothing and table.num_layers:
            step.smoother = self._smoother(schedule.chunks, table.num_layers, smoothing)
        x_TD = self.model(self.cache, step)
        if step.smoother is not None:
            for chunk, last_LK in zip(schedule.chunks, step.smoother.previous_SLK, strict=True):
                chunk.sequence.last_experts = (chunk.end - 1, last_LK)
        sampling, rows = self._sampling_rows(schedule.chunks)
        logits_BV = self.model.head(x_TD.index_select(0, rows))
        if (fault := self.faults.sampler_noise) is not None:
            logits_BV = fault(logits_BV)
        clock.mark("head")
        tokens = sample(
            logits_BV,
            [chunk.sequence.params for chunk in sampling],
            [chunk.sequence.seed for chunk in sampling],
            [chunk.end for chunk in sampling],
        )
        clock.mark("sample")
        return StepResult(step, list(zip(sampling, tokens, strict=True)), logits_BV)

    def all_logits(
        self, schedule: Schedule, table: RoutingTable, policies: tuple[LayerPolicy | None, ...]
    ) -> Tensor:
        """Run `schedule` and return the (T, V) logits of every row, sampling nothing."""
        self.cache.clear(schedule.fresh_blocks)
        step = self._lay_out(schedule.chunks, table, policies, StageClock(), record=False)
        return self.model.head(self.model(self.cache, step))

    def _lay_out(
        self,
        chunks: list[Chunk],
        table: RoutingTable,
        policies: tuple[LayerPolicy | None, ...],
        clock: StageClock,
        record: bool,
    ) -> StepContext:
        """Put the chunks' tokens row by row into one batch."""
        columns: tuple[list[int], ...] = ([], [], [], [], [])
        token_ids, positions, slots, homes, request_ids = columns
        segments: list[Segment] = []
        size = self.config.block_size
        for chunk in chunks:
            sequence, span = chunk.sequence, range(chunk.start, chunk.end)
            segments.append(
                Segment(len(token_ids), chunk.num_tokens, chunk.start, tuple(sequence.blocks))
            )
            token_ids += sequence.token_ids[chunk.start : chunk.end]
            positions += span
            slots += [sequence.blocks[at // size] * size + at % size for at in span]
            homes += [sequence.home] * chunk.num_tokens
            request_ids += [sequence.request_id] * chunk.num_tokens
        host = HostRows(*np.array(columns, dtype=np.int64))
        device = self.model.embed.weight.device
        return StepContext(
            host=host,
            token_ids_T=torch.from_numpy(host.token_ids).to(device),
            positions_T=torch.from_numpy(host.positions).to(device),
            slots_T=torch.from_numpy(host.slots).to(device),
            homes_T=torch.from_numpy(host.homes).to(device),
            plan=plan_attention(segments, size, device),
            table=table,
            policies=policies,
            clock=clock,
            records=[] if record else None,
        )

    def _smoother(self, chunks: list[Chunk], num_layers: int, bonus: float) -> Smoother:
        """Gather what the token before each chunk used; unknown where smoothing was off then."""
        unknown_LK = torch.full((num_layers, self.model.config.top_k), -1)
        previous = []
        for chunk in chunks:
            position, last_LK = chunk.sequence.last_experts or (-1, unknown_LK)
            previous.append(last_LK if position == chunk.start - 1 else unknown_LK)
        device = self.model.embed.weight.device
        lengths = [chunk.num_tokens for chunk in chunks]
        return Smoother(bonus, lengths, torch.stack(previous).to(device))

    def _sampling_rows(self, chunks: list[Chunk]) -> tuple[list[Chunk], Tensor]:
        """Return the chunks that sample and the row of each one's last token."""
        sampling: list[Chunk] = []
        rows: list[int] = []
        end = 0
        for chunk in chunks:
            end += chunk.num_tokens
            if chunk.samples:
                sampling.append(chunk)
                rows.append(end - 1)
        return sampling, torch.tensor(
            rows, dtype=torch.int64, device=self.model.embed.weight.device
        )
