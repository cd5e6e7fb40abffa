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
from engine.runtime.draft.proposal import Proposal
from engine.runtime.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence in a step."""

    sequence: Sequence
    start: int
    num_tokens: int
    num_rerun: int = 0
    """How many of them were computed before and lost to a preemption."""
    proposal: Proposal | None = None
    """What a draft thought comes after the sequence's last token; its drafts are the last rows."""

    @property
    def num_drafts(self) -> int:
        """How many of the tokens are proposals."""
        return self.proposal.num_drafts if self.proposal else 0

    @property
    def num_void(self) -> int:
        """How many of the proposals' rows came to nothing; known once the step was taken in."""
        return self.proposal.num_drafts + 1 - self.proposal.num_kept if self.proposal else 0

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
        return self.end - self.num_drafts == len(self.sequence.token_ids)


@dataclass(frozen=True, slots=True)
class Schedule:
    """What one step runs."""

    chunks: list[Chunk]
    fresh_blocks: dict[int, list[int]]
    """By pool: blocks handed out for this step, to be zeroed before it."""
    preempted: list[Sequence]


class Scheduler:
    """Owns the waiting and the running sequences and the block pools, one per rank."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.pools = [BlockPool(config.num_blocks) for _ in range(config.num_ranks)]
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind those that wait."""
        self.waiting.append(sequence)

    def schedule(self) -> Schedule:
        """Choose the next step's chunks; empty when there is nothing to do."""
        step = Schedule([], {}, [])
        budget = self.config.max_step_tokens
        for sequence in list(self.running):
            if budget == 0 or sequence not in self.running:
                continue
            budget -= self._take(sequence, budget, step)
        while budget and self.waiting and len(self.running) < self.config.max_running:
            sequence = self.waiting[0]
            wanted = min(len(sequence.token_ids), budget)
            if step.preempted or self._lacks_blocks(sequence, wanted):
                break
            self.running.append(self.waiting.popleft())
            budget -= self._take(sequence, budget, step)
        return step

    def lengthen(self, sequence: Sequence, num_tokens: int, step: Schedule) -> bool:
        """Make room for a chunk of `num_tokens` tokens; False, and nothing done, if there is none."""
        if self._lacks_blocks(sequence, num_tokens):
            return False
        self._hand_out(sequence, num_tokens, step)
        return True

    def shrink(self, sequence: Sequence) -> None:
        """Take the blocks back that hold none of a sequence's computed tokens."""
        needed = -(-sequence.num_computed // self.config.block_size)
        self._pool(sequence).give_back(sequence.blocks[needed:])
        del sequence.blocks[needed:]

    def borrow(self, sequence: Sequence, start: int) -> Schedule:
        """Schedule one chunk of a sequence that is not queued, from position `start`.

        Raises:
            RequestError: the running sequences leave too few blocks.
        """
        num_tokens = min(len(sequence.token_ids) - start, self.config.max_step_tokens)
        sequence.num_computed = start
        if self._lacks_blocks(sequence, num_tokens):
            raise RequestError(
                f"{self._missing_blocks(sequence, num_tokens)} cache blocks are needed and "
                f"{self._pool(sequence).num_free} are free; wait until running requests have ended."
            )
        step = Schedule([Chunk(sequence, start, num_tokens)], {}, [])
        self._hand_out(sequence, num_tokens, step)
        return step

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and free its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._free(sequence)

    def move(self, sequence: Sequence, home: int) -> None:
        """Give a sequence another home; if it runs, it starts again there from its tokens."""
        if sequence in self.running:
            self._start_again(sequence, "recovery")
        sequence.home = home

    def _take(self, sequence: Sequence, budget: int, step: Schedule) -> int:
        """Give a running sequence its share of the step; returns the tokens taken."""
        num_tokens = min(len(sequence.token_ids) - sequence.num_computed, budget)
        while self._lacks_blocks(sequence, num_tokens):
            pool = self._pool(sequence)
            victim = next(one for one in reversed(self.running) if self._pool(one) is pool)
            self._preempt(victim, step)
            if victim is sequence:
                return 0
        self._hand_out(sequence, num_tokens, step)
        again = min(max(0, sequence.high_water - sequence.num_computed), num_tokens)
        step.chunks.append(Chunk(sequence, sequence.num_computed, num_tokens, again))
        return num_tokens

    def _preempt(self, sequence: Sequence, step: Schedule) -> None:
        assert not any(chunk.sequence is sequence for chunk in step.chunks), (
            "a sequence that was already scheduled cannot be preempted in the same step"
        )
        self._start_again(sequence, "preemption")
        step.preempted.append(sequence)

    def _start_again(self, sequence: Sequence, cause: str) -> None:
        """Put a running sequence back to the front of the queue; its rows will run again."""
        self.running.remove(sequence)
        self._free(sequence)
        sequence.num_computed, sequence.rerun_cause = 0, cause
        self.waiting.appendleft(sequence)

    def _hand_out(self, sequence: Sequence, num_tokens: int, step: Schedule) -> None:
        blocks = self._pool(sequence).take(self._missing_blocks(sequence, num_tokens))
        sequence.blocks += blocks
        step.fresh_blocks.setdefault(self._pool_of(sequence), []).extend(blocks)

    def _lacks_blocks(self, sequence: Sequence, num_tokens: int) -> bool:
        return self._missing_blocks(sequence, num_tokens) > self._pool(sequence).num_free

    def _pool(self, sequence: Sequence) -> BlockPool:
        return self.pools[self._pool_of(sequence)]

    def _pool_of(self, sequence: Sequence) -> int:
        return sequence.home % len(self.pools)

    def _missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        needed = -(-(sequence.num_computed + num_tokens) // self.config.block_size)
        return max(0, needed - len(sequence.blocks))

    def _free(self, sequence: Sequence) -> None:
        self._pool(sequence).give_back(sequence.blocks)
        sequence.blocks = []
