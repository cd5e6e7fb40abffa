"""Turn a schedule into one forward pass and its results, on the one rank of this process.

`engine.runtime.crew` does the same on several. Deciding who runs is the scheduler's, what the
results mean to a request is the engine's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from engine.cluster.rank import Rank, Work
from engine.cluster.records import RowRecords
from engine.cluster.weights import weights_sha256
from engine.events import Int64, RankEvent
from engine.model.batch import Draw, Span
from engine.model.step import StageClock
from engine.routing.speculation import num_kept
from engine.routing.table import RoutingTable
from engine.runtime.door import InForce
from engine.runtime.draft.rejection import redraw
from engine.runtime.scheduler import Chunk, Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one forward pass brought."""

    chunks: list[Chunk]
    """In the order of their rows."""
    sampled: list[Sampled]
    """The chunks that reached their sequence's end, with the next tokens of each."""
    logits_BV: Tensor | None
    """(B, V) fp32, a row for each token drawn; None when no request needs them."""
    records: list[RowRecords] | None
    """By rank; None when nobody listens."""
    bad_rows: int
    table_version: int
    clock: StageClock
    dropped: list[int] = field(default_factory=list)
    """By MoE layer: slots that found no room; empty without a capacity factor."""
    look_ups: tuple[int, int] = (0, 0)
    """Answers found in tables since the start, and not found; of the ranks that live."""
    ranks: list[RankEvent] = field(default_factory=list)
    """What each rank sent and waited for; empty in one process."""
    rerun_T: Int64 | None = None
    """How many of each row's expert rows ran again in another number format; None for none."""


class Sampled(NamedTuple):
    """The tokens that follow one chunk."""

    chunk: Chunk
    token_ids: list[int]
    """The accepted drafts and the target's own next token."""
    row: int
    """The row of the first one's logits; the others' follow."""


class Terms(NamedTuple):
    """What a step runs under, read once before it begins."""

    table: RoutingTable
    in_force: InForce
    record: bool = False
    """Whether somebody listens, so that decisions are kept."""


class Runner:
    """Runs schedules on the rank of this process."""

    pids: ClassVar[Mapping[int, int]] = {}
    """The process id of each rank elsewhere: none."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    @property
    def members(self) -> Iterable[int]:
        """The devices, all of them in this process."""
        return range(self.rank.config.num_devices)

    def before_step(self) -> None:
        """Do nothing: all that changes a rank of this process does so at once."""

    def run(self, schedule: Schedule, terms: Terms, clock: StageClock) -> StepResult:
        """Run the chunks of `schedule` under one table and one policy."""
        work = work_of(schedule.chunks, schedule.fresh_blocks.get(0, []), terms)
        outcome = self.rank.run(work, terms.table, clock)
        redraw(schedule.chunks, outcome.tokens, outcome.logits_BV)
        keep_experts(schedule.chunks, outcome.last_experts)
        records, precision = self.rank.records(outcome, work), outcome.step.precision
        return StepResult(
            chunks=schedule.chunks,
            sampled=sampled(schedule.chunks, outcome.tokens),
            logits_BV=outcome.logits_BV,
            records=[records] if records else None,
            bad_rows=outcome.step.bad_rows,
            table_version=terms.table.version,
            clock=clock,
            dropped=capacity.dropped if (capacity := outcome.step.capacity) else [],
            look_ups=self.rank.look_ups,
            rerun_T=None if precision is None else precision.rerun_T,
        )

    def all_logits(self, schedule: Schedule, terms: Terms) -> Tensor:
        """Run `schedule` and return the (T, V) logits of every row, sampling nothing."""
        work = work_of(schedule.chunks, schedule.fresh_blocks.get(0, []), terms)
        logits_TV, last_experts = self.rank.all_logits(work, terms.table)
        keep_experts(schedule.chunks, last_experts)
        return logits_TV

    def weights_sha256(self) -> str:
        """Hash every parameter as it stands in memory."""
        return weights_sha256(self.rank.model)

    def census(self) -> dict[int, dict[str, int]]:
        """Return nothing: there are no ranks to count."""
        return {}

    def close(self) -> None:
        """Do nothing: nothing runs elsewhere."""


def work_of(chunks: Iterable[Chunk], fresh_blocks: list[int], terms: Terms) -> Work:
    """Write down all that a rank needs to run `chunks`."""
    policy, record = terms.in_force.policy, terms.record
    smoothing = policy.lean
    return Work(
        spans=[span_of(chunk, smoothing=bool(smoothing), record=record) for chunk in chunks],
        fresh_blocks=fresh_blocks,
        policies=terms.in_force.layers,
        record=record,
        smoothing=smoothing,
        capacity_factor=policy.capacity_factor,
        precision=terms.in_force.policy.precision,
    )


def span_of(chunk: Chunk, *, smoothing: bool, record: bool) -> Span:
    """Write down all that a rank needs to run one chunk."""
    sequence, ages_LE = chunk.sequence, None
    watched: tuple[int, ...] = ()
    if record and sequence.watch:
        watched = tuple(sequence.watch.intersection(range(chunk.start, chunk.end)))
    if smoothing:
        position, last_LE = sequence.last_experts or (-1, None)
        ages_LE = last_LE if position == chunk.start - 1 else None
    drafts = chunk.proposal.token_ids if chunk.proposal else []
    draw = None
    if chunk.samples:
        draw = Draw(sequence.params, sequence.seed, chunk.end - len(drafts))
    return Span(
        sequence.request_id,
        sequence.home,
        chunk.start,
        sequence.token_ids[chunk.start : chunk.end] + drafts,
        tuple(sequence.blocks),
        draw,
        watched,
        ages_LE,
        len(drafts),
    )


def sampled(chunks: Iterable[Chunk], tokens: list[int]) -> list[Sampled]:
    """Give the chunks that reached their sequence's end their next tokens, void ones left out."""
    found, row = [], 0
    for chunk in chunks:
        if not chunk.samples:
            continue
        end = row + 1 + chunk.num_drafts
        kept = tokens[row:end]
        if chunk.proposal is not None:
            kept = kept[: num_kept(chunk.proposal.token_ids, kept)]
        found.append(Sampled(chunk, kept, row))
        row = end
    assert row == len(tokens), f"{len(tokens)} tokens were drawn for {row} rows"
    return found


def keep_experts(chunks: Iterable[Chunk], last_experts: list[Int64]) -> None:
    """Remember what each chunk used lately, for smoothing to lean on."""
    for chunk, ages_LE in zip(chunks, last_experts or (), strict=False):
        chunk.sequence.last_experts = (chunk.end - 1, np.asarray(ages_LE))
