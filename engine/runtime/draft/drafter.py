"""Let the draft propose at the ends of a step's chunks, and learn from what became of it.

Called by `engine.runtime.engine` around each step, by the one thread that steps it:

    propose    the policy says who is drafted for and how far, the draft thinks, chunks grow
    (the step: the target's rows draw a token each, the outbox keeps those that stand)
    learn      counts, times and chances; void keys and values are taken back from both caches

The policy is `engine.routing.speculation`; this file moves tokens between it, the draft and the
scheduler. Rows of a step with a prompt in it are not priced, so an adaptive draft is silent there.
Prices are processor time of the engine's thread: on a machine that others use too the wall clock
makes a draft look slow whose turn it happened to be.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from engine.config import SamplingParams
from engine.faults import Faults
from engine.model.kv_cache import KVCache
from engine.model.sampler import Array
from engine.model.step import StageClock
from engine.routing.speculation import (
    DEFINITION,
    LOOKED_AT,
    MOST_SEQUENCES,
    Figures,
    Speculation,
    Thought,
)
from engine.runtime.draft.network import DraftNetwork, Feed
from engine.runtime.draft.proposal import DraftState, Proposal
from engine.runtime.draft.rejection import draw_proposal
from engine.runtime.runner import StepResult
from engine.runtime.scheduler import Chunk, Schedule, Scheduler
from engine.runtime.sequence import Sequence

MOST_ROWS = 512
"""Tokens that the draft takes in at once when it has fallen behind."""
PRICED_EVERY = 16
"""Of the steps with which the draft has nothing to do, one in so many is timed."""
WARM_UP_PASSES = 9
MOST_EXTRA = 2.0
"""A step that took more plain steps' time beyond one was interrupted, and counts as so many."""
READ_BEFORE = 8
"""Tokens that it reads before those it is compared on."""


class Drafter:
    """One engine's draft at work."""

    def __init__(
        self,
        network: DraftNetwork,
        policy: Speculation,
        scheduler: Scheduler,
        cache: KVCache,
        faults: Faults,
        *,
        by_chance: bool = False,
    ) -> None:
        """Let `network` propose; `by_chance` draws proposals, to be accepted by rejection."""
        self.network, self.policy = network, policy
        self._scheduler, self._cache, self._faults = scheduler, cache, faults
        self._began_s = self._thought_s = self._learning_s = 0.0
        self._priced = False
        self._idle_steps = 0
        self._by_chance = by_chance
        self._warm_up()

    @property
    def figures(self) -> Figures:
        """Counts over all requests."""
        return self.policy.total

    def as_dict(self) -> dict[str, Any]:
        """Return the figures, their definition, and what was learned of costs and chances."""
        costs = self.policy.costs
        return {
            **asdict(self.figures),
            "acceptance": self.figures.acceptance,
            "tokens_per_step": self.figures.tokens_per_step,
            "definition": DEFINITION,
            "step_ms": round(costs.step_s(1) * 1e3, 4),
            "step_of_three_ms": round(costs.step_s(3) * 1e3, 4),
            "pass_ms": round(costs.pass_s(1) * 1e3, 4),
            "chances": self.policy.confidence.table(),
        }

    def propose(self, schedule: Schedule, clock: StageClock, *, silent: bool = False) -> None:
        """Lengthen the chunks that draw a token by what the draft thinks comes after it.

        Args:
            schedule: the step; its chunks are replaced.
            clock: counts deciding as `plan` and the draft's passes as `draft`.
            silent: propose nothing, as while a token's experts depend on those before it.
        """
        began_s = time.thread_time()
        places = self._drawing(schedule.chunks)
        self._priced = False
        if places and not silent and self._concerns(schedule.chunks, places):
            sequences = [schedule.chunks[place].sequence for place in places]
            if self.policy.adaptive:
                self._look_again(sequences, clock)
            if self.policy.wants(len(places)):
                self._lengthen(schedule, places, clock)
            self._began_s = time.thread_time()
            self._thought_s = self._began_s - began_s + self._learning_s
            self._learning_s = 0.0
        clock.mark("plan")

    def learn(self, result: StepResult) -> None:
        """Take in what the step made of the proposals."""
        policy, now_s = self.policy, time.thread_time()
        policy.total.steps += len(result.sampled)
        if policy.adaptive and not self._priced:
            return
        base, thinkers = len(result.chunks), 0
        for chunk, _, _ in result.sampled:
            thinkers += chunk.proposal is not None
        spent_s = self._price(result.chunks, now_s - self._began_s, thinkers) if self._priced else 0
        for chunk, _, _ in result.sampled:
            sequence, proposal = chunk.sequence, chunk.proposal
            if proposal is not None:
                self._judge(chunk, proposal, spent_s / thinkers, base)
            elif self._priced and _state(sequence).track.on:
                policy.weigh(_state(sequence).track, 0, 0.0, base, sequence.num_output)
        self._learning_s = time.thread_time() - now_s

    def _price(self, chunks: SequenceOf[Chunk], step_s: float, thinkers: int) -> float:
        """Keep a step's time; return what drafting cost in it, all in all.

        A step after the draft's passes is dearer than a plain one even without proposals: the
        draft's weights have driven the target's out of the processor's memory.
        """
        costs, base = self.policy.costs, len(chunks)
        rows = sum(chunk.num_tokens for chunk in chunks)
        if rows > base or not thinkers:
            costs.took_step(rows, step_s)
        if not thinkers:
            return 0.0
        plain_s = costs.step_s(base)
        return self._thought_s + min(step_s - plain_s, MOST_EXTRA * plain_s)

    def _concerns(self, chunks: SequenceOf[Chunk], places: SequenceOf[int]) -> bool:
        """Say whether a step has anything to do with the draft, and set whether it is priced.

        Where every sequence is switched off, only one step in `PRICED_EVERY` has: its time is kept.
        """
        if not self.policy.adaptive:
            self._priced = all(chunk.num_tokens == 1 for chunk in chunks)
            return True
        if len(chunks) > MOST_SEQUENCES or any(chunk.num_tokens != 1 for chunk in chunks):
            return False
        if not any(self._awake(chunks[place].sequence) for place in places):
            self._idle_steps += 1
            if self._idle_steps % PRICED_EVERY:
                return False
        self._priced = True
        return True

    def _drawing(self, chunks: SequenceOf[Chunk]) -> list[int]:
        """Return the places of the chunks that draw a token; their sequences have a state then."""
        places = []
        for place, chunk in enumerate(chunks):
            if chunk.samples:
                places.append(place)
                if chunk.sequence.draft is None:
                    chunk.sequence.draft = DraftState(self.policy.new_track())
        return places

    def _awake(self, sequence: Sequence) -> bool:
        track = _state(sequence).track
        return track.on or self.policy.looks(track, sequence.num_output)

    def _warm_up(self) -> None:
        """Time a few passes, so that the first request in a large batch is priced as well."""
        memory = self.network.remember()
        for _ in range(WARM_UP_PASSES):
            began_s = time.thread_time()
            with torch.inference_mode():
                self.network.run([Feed(memory, [0])])
            self.policy.costs.took_pass(1, time.thread_time() - began_s)

    def _judge(self, chunk: Chunk, proposal: Proposal, spent_s: float, base: int) -> None:
        sequence, state = chunk.sequence, chunk.sequence.draft
        assert state is not None and state.memory is not None, "nobody thought about the sequence"
        policy, accepted = self.policy, proposal.num_kept - 1
        policy.judge(proposal.thoughts, proposal.num_drafts, accepted)
        if self._priced:
            policy.weigh(state.track, accepted, spent_s, base, sequence.num_output)
        if sequence.is_finished:
            state.memory = None
            return
        state.memory.roll_back(sequence.num_computed)
        if chunk.end > sequence.num_computed:
            self._cache.forget(sequence.blocks, sequence.num_computed, chunk.end)
            self._scheduler.shrink(sequence)

    def _lengthen(self, schedule: Schedule, places: SequenceOf[int], clock: StageClock) -> None:
        """Think, choose, and put the chosen drafts at the ends of the chunks."""
        sequences = [schedule.chunks[place].sequence for place in places]
        thoughts = self._think(sequences, clock)
        if not any(thoughts):
            return
        room = self._scheduler.config.max_step_tokens
        room -= sum(chunk.num_tokens for chunk in schedule.chunks)
        for place, own, length in zip(
            places, thoughts, self.policy.lengths(thoughts, room), strict=True
        ):
            chunk = schedule.chunks[place]
            num_tokens = chunk.num_tokens + length
            if length and not self._scheduler.lengthen(chunk.sequence, num_tokens, schedule):
                length, num_tokens = 0, chunk.num_tokens
            if own:
                proposal = Proposal(own, length)
                schedule.chunks[place] = replace(chunk, num_tokens=num_tokens, proposal=proposal)

    def _think(self, sequences: SequenceOf[Sequence], clock: StageClock) -> list[list[Thought]]:
        """Let the draft think of the next tokens of each sequence, as far as it may pay."""
        policy = self.policy
        thoughts: list[list[Thought]] = [[] for _ in sequences]
        rooms = [self._room(sequence) for sequence in sequences]
        live = list(range(len(sequences)))
        for depth in range(policy.longest):
            live = [
                index
                for index in live
                if depth < rooms[index]
                and policy.worth_thinking(
                    _state(sequences[index]).track,
                    thoughts[index][-1].chance if depth else 1.0,
                    len(sequences),
                )
            ]
            if not live:
                break
            clock.mark("plan")
            feeds = [self._feed(sequences[index], thoughts[index]) for index in live]
            began_s = time.thread_time()
            logits_BV = self._pass(feeds)
            if depth:
                policy.costs.took_pass(len(live), time.thread_time() - began_s)
            clock.mark("draft")
            for logits_V, index in zip(logits_BV, live, strict=True):
                thoughts[index].append(self._thought(sequences[index], logits_V, thoughts[index]))
        return thoughts

    def _thought(self, sequence: Sequence, logits_V: Array, before: SequenceOf[Thought]) -> Thought:
        """Weigh what the draft thinks of next after `before`."""
        params, shares_V = sequence.params, None
        if self._by_chance and params.temperature > 0:
            position = len(sequence.token_ids) + len(before)
            token_id, shares_V = draw_proposal(logits_V, params, sequence.seed, position)
            confidence = float(shares_V[token_id])
        else:
            token_id, confidence = propose_from(logits_V, params)
        chance = before[-1].chance if before else 1.0
        thought = self.policy.thought(_state(sequence).track, token_id, confidence, chance)
        thought.shares_V = shares_V
        return thought

    def _room(self, sequence: Sequence) -> int:
        """Return how many tokens can be proposed: 0 for a sequence that is not drafted for."""
        if not _state(sequence).track.on:
            return 0
        left = sequence.max_tokens - sequence.num_output - 1
        return min(left, self.network.num_positions - len(sequence.token_ids))

    def _feed(self, sequence: Sequence, thoughts: SequenceOf[Thought]) -> Feed:
        """Return what the draft has not seen yet, at most `MOST_ROWS` tokens of it."""
        state = _state(sequence)
        memory = state.memory = state.memory or self.network.remember()
        if thoughts:
            return Feed(memory, [thoughts[-1].token_id])
        while len(sequence.token_ids) - memory.length > MOST_ROWS:
            start = memory.length
            self.network.run([Feed(memory, sequence.token_ids[start : start + MOST_ROWS])])
        return Feed(memory, sequence.token_ids[memory.length :])

    def _pass(self, feeds: SequenceOf[Feed]) -> Array:
        logits_BV = self.network.run(feeds)
        if (fault := self._faults.draft_propose) is not None:
            logits_BV = fault(logits_BV)
        return np.asarray(logits_BV.numpy())

    def _look_again(self, sequences: SequenceOf[Sequence], clock: StageClock) -> None:
        """Compare the draft with what the target wrote, where that is due, one text a step."""
        for sequence in sequences:
            track = _state(sequence).track
            if track.on or not self.policy.looks(track, sequence.num_output):
                continue
            recent = sequence.token_ids[-LOOKED_AT - READ_BEFORE :]
            count = min(LOOKED_AT, len(recent) - 1)
            logits_NV = self.network.read(recent, count)
            if (fault := self._faults.draft_propose) is not None:
                logits_NV = fault(logits_NV)
            clock.mark("draft")
            temperature = sequence.params.temperature or 1.0
            likeliest = (logits_NV / max(temperature, 1e-3)).softmax(-1).max(-1)
            expected, confidences = likeliest.indices.tolist(), likeliest.values.tolist()
            agrees = [one == other for one, other in zip(expected, recent[-count:], strict=True)]
            chances = [self.policy.confidence.chance(confidence) for confidence in confidences]
            for confidence, agreed in zip(confidences, agrees, strict=True):
                self.policy.confidence.judged(confidence, agreed)
            self.policy.look(track, chances, agrees, sequence.num_output, len(sequences))
            return


def propose_from(logits_V: Array, params: SamplingParams) -> tuple[int, float]:
    """Return the draft's most likely token, and its probability when tempered as the target is."""
    token_id = int(logits_V.argmax())
    if params.temperature > 0:
        logits_V = logits_V / np.float32(max(params.temperature, 1e-3))
    relative_V = np.exp(logits_V - logits_V[token_id])
    return token_id, float(1.0 / relative_V.sum())


def _state(sequence: Sequence) -> DraftState:
    assert sequence.draft is not None, "the step draws no token of the sequence"
    return sequence.draft
