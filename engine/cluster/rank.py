"""One rank: a model, its cache, and how a step's spans run through them.

The engine without `--ranks` has one of these in its own process; with it, each worker process has
one. Deciding who runs is the scheduler's, what the results mean to a request is the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine.cluster.records import RowRecords, row_records
from engine.config import EngineConfig, ModelConfig
from engine.errors import ConfigError
from engine.events import Int64
from engine.faults import Faults
from engine.kernels.registry import Target
from engine.model.batch import Span, lay_out
from engine.model.kv_cache import KVCache
from engine.model.moe import MoE
from engine.model.ranges import annotate, give_ranges
from engine.model.sampler import sample
from engine.model.step import StageClock, StepContext
from engine.model.transformer import Transformer
from engine.routing.cache import LookUps
from engine.routing.capacity import Capacity
from engine.routing.policy import LayerPolicy
from engine.routing.precision import Precision, PrecisionRouter
from engine.routing.smoothing import NEVER, Smoother, Smoothing
from engine.routing.table import RoutingTable

CANARY_REQUEST = -2
"""Owns the rows that try out a table."""


def canary_block(config: EngineConfig) -> int:
    """Return the cache block of those rows: one beyond those that are handed out."""
    return config.num_blocks + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one rank runs in one step, under one table and one policy."""

    spans: list[Span]
    fresh_blocks: list[int]
    """Cache blocks handed out for this step, to be zeroed before it."""
    policies: tuple[LayerPolicy | None, ...]
    """One per MoE layer."""
    record: bool
    """Whether somebody listens, so that decisions are kept."""
    smoothing: Smoothing = field(default_factory=Smoothing)
    capacity_factor: float | None = None
    precision: Precision = field(default_factory=Precision)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one step brought on one rank."""

    step: StepContext
    tokens: list[int]
    """The next token of each span that has a `draw`, and of each of its drafts, in their order."""
    logits_BV: Tensor
    """(B, V) fp32, a row for each of `tokens`."""
    last_experts: list[Int64] = field(default_factory=list)
    """While smoothing is on: for each span (L, E) how long ago each expert was last used."""


class Rank:
    """Owns a model and its cache; runs one step at a time."""

    def __init__(
        self, model: Transformer, model_config: ModelConfig, config: EngineConfig, faults: Faults
    ) -> None:
        assert not any(module.training for module in model.modules()), (
            "the model is set to train: noise on the gate and its balancing loss belong there alone"
        )
        self.model, self.config, self.faults = model, config, faults
        self.precision: PrecisionRouter | None = None
        """Chooses number formats; set where experts are held in both."""
        moes = [module for module in model.modules() if isinstance(module, MoE)]
        self._gates = {
            layer: moe.gate for layer, moe in zip(model_config.moe_layers, moes, strict=True)
        }
        self._tables: list[LookUps[Any]] = [moe.placer.look_ups for moe in moes]
        self._tables += [moe.dispatcher.order.look_ups for moe in moes[:1]]
        annotate(model)
        give_ranges([("sample", self, "sample")])
        self.cache = KVCache(
            model_config.num_layers,
            canary_block(config) if config.num_ranks > 1 else config.num_blocks,
            config.block_size,
            model_config.num_kv_heads,
            model_config.head_dim,
            getattr(torch, config.dtype),
            model.embed.weight.device,
        )

    def run(self, work: Work, table: RoutingTable, clock: StageClock) -> Outcome:
        """Lay out the batch, run the layers, sample."""
        step = self._prepare(work, table, clock)
        x_TD = self.model(self.cache, step)
        logits_BV = self.model.head(x_TD.index_select(0, self._last_rows(work.spans)))
        if (fault := self.faults.sampler_noise) is not None:
            logits_BV = fault(logits_BV)
        clock.mark("head")
        tokens = self.sample(logits_BV, work.spans)
        clock.mark("sample")
        return Outcome(step, tokens, logits_BV, _last_experts(step))

    def sample(self, logits_BV: Tensor, spans: Sequence[Span]) -> list[int]:
        """Choose the token after each span that draws one, and after each of its proposals."""
        drawing = [
            (span.draw, ahead)
            for span in spans
            if span.draw
            for ahead in range(span.num_drafts + 1)
        ]
        return sample(
            logits_BV,
            [draw.params for draw, _ in drawing],
            [draw.seed for draw, _ in drawing],
            [draw.position + ahead for draw, ahead in drawing],
        )

    @property
    def look_ups(self) -> tuple[int, int]:
        """How many look-ups found an answer since the start, and how many did not."""
        return sum(table.hits for table in self._tables), sum(t.misses for t in self._tables)

    def look_up(self, max_rows: int) -> None:
        """Look answers up in steps of at most `max_rows` rows from now on; 0 never."""
        for table in self._tables:
            table.max_rows = max_rows

    def records(self, outcome: Outcome, work: Work) -> RowRecords | None:
        """Copy out what `work` decided; None when it kept no records."""
        if not work.record:
            return None
        drawn, format = outcome.tokens, self.config.number_format
        return row_records(outcome.step, work.spans, drawn, self._gates, format)

    def all_logits(self, work: Work, table: RoutingTable) -> tuple[Tensor, list[Int64]]:
        """Run `work`, sampling nothing.

        Returns:
            the (T, V) logits of every row, and what `Outcome.last_experts` says.
        """
        step = self._prepare(work, table, StageClock())
        return self.model.head(self.model(self.cache, step)), _last_experts(step)

    def _prepare(self, work: Work, table: RoutingTable, clock: StageClock) -> StepContext:
        self.cache.clear(work.fresh_blocks)
        device = self.model.embed.weight.device
        step = lay_out(
            work.spans,
            self.config.block_size,
            table,
            work.policies,
            clock,
            device,
            record=work.record,
        )
        if work.smoothing and work.spans and table.num_layers:
            step.smoother = self._smoother(work.spans, table.num_layers, work.smoothing)
        if work.capacity_factor is not None and table.num_layers:
            step.capacity = Capacity(work.capacity_factor, table.num_layers, table.num_experts)
        if self.precision is not None and table.num_layers:
            host = step.host
            clock.mark("embed")
            step.precision = self.precision.begin(
                work.precision, host.request_ids, host.positions, host.token_ids
            )
            if step.precision is not None:
                clock.mark("format")
        return step

    def _smoother(self, spans: Sequence[Span], num_layers: int, smoothing: Smoothing) -> Smoother:
        """Gather what was used before each span; nothing where smoothing was off then."""
        shape = (len(spans), num_layers, self.model.config.num_experts)
        ages_SLE = torch.full(shape, NEVER, dtype=torch.int64)
        for row, span in enumerate(spans):
            if span.ages_LE is not None:
                ages_SLE[row] = torch.from_numpy(span.ages_LE)
        device = self.model.embed.weight.device
        return Smoother(smoothing, [len(span.token_ids) for span in spans], ages_SLE.to(device))

    def _last_rows(self, spans: Sequence[Span]) -> Tensor:
        """Return the rows that draw a token: a span's last one, with drafts all from its own."""
        rows: list[int] = []
        end = 0
        for span in spans:
            end += len(span.token_ids)
            if span.draw:
                rows += range(end - 1 - span.num_drafts, end)
        return torch.tensor(rows, dtype=torch.int64, device=self.model.embed.weight.device)


def _last_experts(step: StepContext) -> list[Int64]:
    return [] if step.smoother is None else list(step.smoother.ages_SLE.cpu().numpy())


def target_of(config: EngineConfig, model: ModelConfig) -> Target:
    """Describe what a rank runs on, for the choice of its operations."""
    if config.precision != "model" and not model.is_moe:
        raise ConfigError(
            f"precision ({config.precision}) must be model for {config.model}, which "
            "has no experts."
        )
    matrix = 2 * model.moe_intermediate_size * model.hidden_size
    return Target(
        device=config.run_on,
        dtype=config.dtype,
        deterministic=config.deterministic,
        scheme={"model": "native", "int8": "w8a8", "auto": "mixed"}[config.precision],
        expert_bytes=matrix * getattr(torch, config.dtype).itemsize,
        measure=config.measure_kernels and config.num_ranks == 1,  # ranks must not differ
    )
