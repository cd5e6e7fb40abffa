"""Run a schedule on several ranks.

The controller's side: it splits each step by the sequences' homes, chooses how rows are exchanged,
and puts the ranks' shares together again. `engine.cluster.worker` is the other side.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.cluster.launch import RankLostError, Ranks
from engine.cluster.messages import RunStep, StepReport
from engine.cluster.rank import Work
from engine.config import EngineConfig
from engine.events import RankEvent
from engine.model.step import StageClock
from engine.runtime.runner import StepResult, Terms, keep_experts, sampled, work_of
from engine.runtime.scheduler import Chunk, Schedule


class RankedRunner:
    """Runs schedules on the ranks of `ranks`."""

    def __init__(self, ranks: Ranks, config: EngineConfig) -> None:
        self.ranks, self.small_batch_rows = ranks, config.small_batch_rows
        self.exchange = config.exchange
        """How rows are exchanged from the next step on, one of `EXCHANGES`."""

    def run(self, schedule: Schedule, terms: Terms, clock: StageClock) -> StepResult:
        """Run the chunks of `schedule`, each on the rank its sequence lives on.

        Raises:
            RankLostError: a rank died or froze; nothing of the step counts then.
        """
        by_home = _by_home(schedule.chunks, self.ranks.members)
        works = {
            rank: work_of(chunks, schedule.fresh_blocks.get(rank, []), terms)
            for rank, chunks in by_home.items()
        }
        mode = self.mode_for(sum(chunk.num_tokens for chunk in schedule.chunks))
        reports = self._ask(works, terms.table.version, mode, began_ns=clock.began_ns)
        clock.add(_mean([report.stage_ms for report in reports.values()]))
        chunks = list(itertools.chain.from_iterable(by_home.values()))
        for rank, report in reports.items():
            keep_experts(by_home[rank], report.last_experts)
        return StepResult(
            chunks=chunks,
            sampled=sampled(chunks, [t for report in reports.values() for t in report.tokens]),
            logits_BV=_logits(reports),
            records=[report.records for report in reports.values() if report.records]
            if terms.record
            else None,
            bad_rows=sum(report.bad_rows for report in reports.values()),
            dropped=_summed([report.dropped for report in reports.values() if report.dropped]),
            look_ups=_looked_up(reports),
            table_version=terms.table.version,
            clock=clock,
            ranks=[_rank_event(rank, report, mode) for rank, report in reports.items()],
        )

    def mode_for(self, num_rows: int) -> str:
        """Return how a step of `num_rows` rows, on all ranks together, exchanges them."""
        return "request" if num_rows < self.small_batch_rows else self.exchange

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that take part."""
        return self.ranks.members

    def try_out(self, works: Mapping[int, Work], version: int) -> dict[int, StepReport]:
        """Run rows that belong to no request, to try out the table of `version`.

        Raises:
            RankLostError: a rank died or froze.
        """
        return self._ask(works, version, self.exchange, trial=True)

    def _ask(
        self,
        works: Mapping[int, Work],
        version: int,
        mode: str,
        *,
        began_ns: int = 0,
        trial: bool = False,
    ) -> dict[int, StepReport]:
        rounds = max(len(work.spans) for work in works.values())
        return self.ranks.ask(
            {
                rank: RunStep(work, mode, rounds, version, began_ns, trial)
                for rank, work in works.items()
            }
        )


def _by_home(chunks: list[Chunk], members: tuple[int, ...]) -> dict[int, list[Chunk]]:
    """Return every member's chunks; one without any is there too, for it must join in."""
    found: dict[int, list[Chunk]] = {rank: [] for rank in members}
    for chunk in chunks:
        found[chunk.sequence.home].append(chunk)
    return found


def _logits(reports: Mapping[int, StepReport]) -> Tensor | None:
    parts = [report.logits_BV for report in reports.values()]
    if any(part is None for part in parts):
        return None
    return torch.from_numpy(np.concatenate(parts))


def _looked_up(reports: Mapping[int, StepReport]) -> tuple[int, int]:
    found, missed = _summed([report.look_ups for report in reports.values()])
    return found, missed


def _summed(rows: Sequence[Sequence[int]]) -> list[int]:
    """Add numbers of several ranks: [1, 2] and [3, 0] give [4, 2]."""
    return [sum(column) for column in zip(*rows, strict=True)]


def _mean(stages: list[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for spent in stages:
        for stage, milliseconds in spent.items():
            total[stage] += milliseconds / len(stages)
    return dict(total)


def _rank_event(rank: int, report: StepReport, mode: str) -> RankEvent:
    exchanged = report.exchanged
    return RankEvent(
        rank=rank,
        mode=mode,
        rows=exchanged.rows_G,
        num_bytes=exchanged.bytes_G,
        messages=exchanged.messages_G,
        wait_ms=exchanged.wait_s * 1e3,
        transfer_ms=exchanged.transfer_s * 1e3,
        busy_ms=report.busy_ms,
        stage_ms=report.stage_ms,
        spans=report.spans,
        flights=report.flights,
    )


__all__ = ["RankLostError", "RankedRunner"]
