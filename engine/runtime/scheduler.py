"""Decide which sequences run in the next step, and how many tokens of each.

Continuous batching: running sequences go first, in the order in which they are due, then as many
waiting ones as fit; a long prompt is prefilled in chunks, and what of it lies in the cache already
is not computed again (`engine.runtime.prefix`). Without priorities whoever came first is due first;
a more urgent request overtakes (`engine.runtime.waiting`) and may take a running one's place. When
blocks run out the running sequence that is due last gives its blocks back and starts again later
(preemption by recomputation).
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.errors import RequestError
from engine.runtime.draft.proposal import Proposal
from engine.runtime.prefix import Chain, Key, SharedBlocks
from engine.runtime.sequence import Sequence
from engine.runtime.waiting import Queue, due


@dataclass(slots=True, eq=False)
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
        own = self.num_tokens - (self.proposal.num_drafts if self.proposal else 0)
        return self.start + own == len(self.sequence.token_ids)


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
        self.pools = [SharedBlocks(config.num_blocks) for _ in range(config.num_ranks)]
        self.waiting = Queue()
        self.running: list[Sequence] = []
        """In the order in which they are due."""
        self.conditions: Key | None = None
        """What cached values depend on in the next step besides tokens; None: share none."""
        self.prefix_queries = 0
        """Tokens of sequences that began, looked up in the cache."""
        self.prefix_hits = 0
        """Of those, the tokens that were found, so that they were not computed."""

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; from any thread."""
        self.waiting.add(sequence)

    def schedule(self) -> Schedule:
        """Choose the next step's chunks; empty when there is nothing to do."""
        step = Schedule([], {}, [])
        self._make_way(step)
        displaced = len(step.preempted)
        budget = self.config.max_step_tokens
        for sequence in list(self.running):
            if budget == 0 or (step.preempted and sequence not in self.running):
                continue
            budget -= self._take(sequence, budget, step)
        while budget and self.waiting and len(self.running) < self.config.max_running:
            sequence = self.waiting.first
            if len(step.preempted) > displaced or not self._admit(sequence, budget):
                break
            self._let_in(sequence)
            budget -= self._take(sequence, budget, step)
        return step

    def computed(self, chunks: list[Chunk], conditions: Key | None) -> None:
        """Let others find the blocks that a step has filled.

        Args:
            chunks: what ran; their sequences' `num_computed` already counts it.
            conditions: what the step ran under, from its beginning to its end.
        """
        if not self.config.prefix_reuse:
            return
        for sequence in (chunk.sequence for chunk in chunks):
            chain = sequence.chain
            if chain is None or chain.conditions != conditions:
                sequence.chain = None  # its values are a mixture from here on
                continue
            num_full = sequence.num_computed // self.config.block_size
            if num_full > chain.num_shared and sequence.blocks:
                keys = chain.upto(num_full, sequence.token_ids, self.config.block_size)
                for block in range(chain.num_shared, num_full):
                    self._pool(sequence).share(sequence.blocks[block], keys[block])
                chain.num_shared = num_full

    def lengthen(self, sequence: Sequence, num_tokens: int, step: Schedule) -> bool:
        """Make room for a chunk of `num_tokens` tokens; False, and nothing done, without room."""
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

    def forget(self, rank: int) -> None:
        """Share nothing of a rank whose cache is gone; no sequence lives there any more."""
        self.pools[rank].forget()

    def move(self, sequence: Sequence, home: int) -> None:
        """Give a sequence another home; if it runs, it starts again there from its tokens."""
        if sequence in self.running:
            self._start_again(sequence, "recovery")
        sequence.home = home

    def _make_way(self, step: Schedule) -> None:
        """Preempt whoever holds what a more urgent waiting sequence needs."""
        while self.waiting:
            urgent = self.waiting.first
            full = len(self.running) >= self.config.max_running
            victim = self._last_due(None if full else self._pool(urgent))
            if victim is None or victim.priority <= urgent.priority or due(victim) < due(urgent):
                return
            if not full and self._admit(urgent, self.config.max_step_tokens):
                self._free(urgent)
                return
            self._preempt(victim, step)

    def _admit(self, sequence: Sequence, budget: int) -> bool:
        """Give a waiting sequence the blocks that hold its beginning, if the rest has room."""
        self._reuse(sequence)
        wanted = min(len(sequence.token_ids) - sequence.num_computed, budget)
        if self._lacks_blocks(sequence, wanted):
            self._free(sequence)
            return False
        return True

    def _let_in(self, sequence: Sequence) -> None:
        """Let a waiting sequence run; it has the blocks that hold its beginning."""
        self.waiting.remove(sequence)
        bisect.insort(self.running, sequence, key=due)
        if sequence.chain is not None:
            self.prefix_queries += len(sequence.token_ids)
            self.prefix_hits += sequence.num_computed
        if not sequence.high_water:
            sequence.high_water = sequence.num_reused = sequence.num_computed

    def _reuse(self, sequence: Sequence) -> None:
        """Find the beginning of a sequence in the cache, but for its last token and watched ones.

        The last token always runs, for the logits that follow it.
        """
        if self.conditions is None or not self.config.prefix_reuse:
            return
        size = self.config.block_size
        if sequence.chain is None or sequence.chain.conditions != self.conditions:
            sequence.chain = Chain(self.conditions)
        most = min((len(sequence.token_ids) - 1, *sequence.watch))
        keys = sequence.chain.upto(most // size, sequence.token_ids, size)
        sequence.blocks = self._pool(sequence).find(keys)
        sequence.chain.num_shared = len(sequence.blocks)
        sequence.num_computed = len(sequence.blocks) * size

    def _take(self, sequence: Sequence, budget: int, step: Schedule) -> int:
        """Give a running sequence its share of the step; returns the tokens taken."""
        num_tokens = min(len(sequence.token_ids) - sequence.num_computed, budget)
        if self._missing_blocks(sequence, num_tokens):
            if not self._make_room(sequence, num_tokens, step):
                return 0
            self._hand_out(sequence, num_tokens, step)
        again = min(max(0, sequence.high_water - sequence.num_computed), num_tokens)
        step.chunks.append(Chunk(sequence, sequence.num_computed, num_tokens, again))
        return num_tokens

    def _make_room(self, sequence: Sequence, num_tokens: int, step: Schedule) -> bool:
        """Preempt others until there are blocks; False if the sequence itself had to go."""
        while self._lacks_blocks(sequence, num_tokens):
            victim = self._last_due(self._pool(sequence))
            assert victim is not None, "the sequence itself runs there"
            self._preempt(victim, step)
            if victim is sequence:
                return False
        return True

    def _last_due(self, pool: SharedBlocks | None) -> Sequence | None:
        """Return the running sequence that is due last, of one pool or of all."""
        line = reversed(self.running)
        return next((one for one in line if pool is None or self._pool(one) is pool), None)

    def _preempt(self, sequence: Sequence, step: Schedule) -> None:
        assert not any(chunk.sequence is sequence for chunk in step.chunks), (
            "a sequence that was already scheduled cannot be preempted in the same step"
        )
        self._start_again(sequence, "preemption")
        step.preempted.append(sequence)

    def _start_again(self, sequence: Sequence, cause: str) -> None:
        """Let a running sequence wait again; its rows will run again."""
        self.running.remove(sequence)
        self._free(sequence)
        sequence.rerun_cause = cause
        self.waiting.add(sequence)

    def _hand_out(self, sequence: Sequence, num_tokens: int, step: Schedule) -> None:
        blocks = self._pool(sequence).take(self._missing_blocks(sequence, num_tokens))
        sequence.blocks += blocks
        step.fresh_blocks.setdefault(self._pool_of(sequence), []).extend(blocks)

    def _lacks_blocks(self, sequence: Sequence, num_tokens: int) -> bool:
        return self._missing_blocks(sequence, num_tokens) > self._pool(sequence).num_free

    def _pool(self, sequence: Sequence) -> SharedBlocks:
        return self.pools[self._pool_of(sequence)]

    def _pool_of(self, sequence: Sequence) -> int:
        return sequence.home % len(self.pools)

    def _missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        needed = -(-(sequence.num_computed + num_tokens) // self.config.block_size)
        return max(0, needed - len(sequence.blocks))

    def _free(self, sequence: Sequence) -> None:
        """Take a sequence's blocks; whatever it goes on with, it begins at its first token."""
        self._pool(sequence).give_back(sequence.blocks)
        sequence.blocks, sequence.num_computed = [], 0
        if sequence.chain is not None:
            sequence.chain.num_shared = 0
