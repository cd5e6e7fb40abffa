"""Decide which sequences run in the next step, and how many tokens of each.

Continuous batching: running sequences go first, in order of arrival, then as many waiting ones as
fit; a long prompt is prefilled in chunks. When blocks run out the youngest running sequence gives
its blocks back and starts again later (preemption by recomputation).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.errors import RequestError
from engine.model.kv_cache import BlockPool
from engine.runtime.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence in a step."""

    sequence: Sequence
    start: int
    num_tokens: int
    num_rerun: int = 0
    """How many of them were computed before and lost to a preemption."""

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.num_tokens

    @property
    def num_prefill(self) -> int:
        """Tokens that belong to the prompt."""
        return max(0, min(self.end, len(self.sequence.prompt_token_ids)) - self.start)

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the sequence's last token, so that a next one follows."""
        return self.end == len(self.sequence.token_ids)


@dataclass(frozen=True, slots=True)
class Schedule:
    """What one step runs."""

    chunks: list[Chunk]
    fresh_blocks: list[int]
    """Blocks handed out for this step, to be zeroed before it."""
    preempted: list[Sequence]


class Scheduler:
    """Owns the waiting and the running sequences and the block pool."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind those that wait."""
        self.waiting.append(sequence)

    def schedule(self) -> Schedule:
        """Choose the next step's chunks; empty when there is nothing to do."""
        step = Schedule([], [], [])
        budget = self.config.max_step_tokens
        for sequence in list(self.running):
            if budget == 0 or sequence not in self.running:
                continue
            budget -= self._take(sequence, budget, step)
        while budget and self.waiting and len(self.running) < self.config.max_running:
            sequence = self.waiting[0]
            wanted = min(len(sequence.token_ids), budget)
            if step.preempted or self._missing_blocks(sequence, wanted) > self.pool.num_free:
                break
            self.running.append(self.waiting.popleft())
            budget -= self._take(sequence, budget, step)
        return step

    def borrow(self, sequence: Sequence, start: int) -> Schedule:
        """Schedule one chunk of a sequence that is not queued, from position `start`.

        Raises:
            RequestError: the running sequences leave too few blocks.
        """
        num_tokens = min(len(sequence.token_ids) - start, self.config.max_step_tokens)
        sequence.num_computed = start
        missing = self._missing_blocks(sequence, num_tokens)
        if missing > self.pool.num_free:
            raise RequestError(
                f"{missing} cache blocks are needed and {self.pool.num_free} are free; wait until "
                "running requests have ended."
            )
        blocks = self.pool.take(missing)
        sequence.blocks += blocks
        return Schedule([Chunk(sequence, start, num_tokens)], blocks, [])

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and free its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._free(sequence)

    def _take(self, sequence: Sequence, budget: int, step: Schedule) -> int:
        """Give a running sequence its share of the step; returns the tokens taken."""
        num_tokens = min(len(sequence.token_ids) - sequence.num_computed, budget)
        while (missing := self._missing_blocks(sequence, num_tokens)) > self.pool.num_free:
            victim = self.running[-1]
            self._preempt(victim, step)
            if victim is sequence:
                return 0
        blocks = self.pool.take(missing)
        sequence.blocks += blocks
        step.fresh_blocks.extend(blocks)
        again = min(max(0, sequence.high_water - sequence.num_computed), num_tokens)
        step.chunks.append(Chunk(sequence, sequence.num_computed, num_tokens, again))
        return num_tokens

    def _preempt(self, sequence: Sequence, step: Schedule) -> None:
        assert not any(chunk.sequence is sequence for chunk in step.chunks), (
            "a sequence that was already scheduled cannot be preempted in the same step"
        )
        self.running.remove(sequence)
        self._free(sequence)
        sequence.num_computed = 0
        self.waiting.appendleft(sequence)
        step.preempted.append(sequence)

    def _missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        needed = -(-(sequence.num_computed + num_tokens) // self.config.block_size)
        return max(0, needed - len(sequence.blocks))

    def _free(self, sequence: Sequence) -> None:
        self.pool.give_back(sequence.blocks)
        sequence.blocks = []
