"""What requests gain: new tokens given to their sequences, ends found, outputs kept until read.

Used by `engine.runtime.engine`, by the one thread that steps it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import Tensor

from engine.config import EngineConfig
from engine.model.sampler import logprobs
from engine.runtime.announcer import Announcer
from engine.runtime.results import RequestOutput, completion_of
from engine.runtime.runner import Sampled, StepResult
from engine.runtime.scheduler import Chunk, Scheduler
from engine.runtime.sequence import Sequence


class Outbox:
    """Outputs that nobody has taken yet, in order."""

    def __init__(
        self,
        config: EngineConfig,
        eos_token_ids: Collection[int],
        scheduler: Scheduler,
        announcer: Announcer,
    ) -> None:
        self._hash_logits, self._eos_token_ids = config.hash_logits, eos_token_ids
        self._scheduler, self._announcer = scheduler, announcer
        self._unread: list[RequestOutput] = []

    def __bool__(self) -> bool:
        return bool(self._unread)

    def read(self) -> list[RequestOutput]:
        """Hand out everything, once."""
        outputs, self._unread = self._unread, []
        return outputs

    def put_back(self, outputs: Iterable[RequestOutput]) -> None:
        """Let the next reader have what was read for another's sake first."""
        self._unread[:0] = outputs

    def under_way(self) -> set[int]:
        """Return the requests whose end nobody has seen."""
        living = (*self._scheduler.running, *self._scheduler.waiting)
        ended = (output.request_id for output in self._unread if output.finished)
        return {sequence.request_id for sequence in living} | set(ended)

    def take(self, result: StepResult) -> None:
        """Give each sequence its new tokens and end those that are done."""
        for sampled in result.sampled:
            self._give(sampled, result.logits_BV)

    def _give(self, sampled: Sampled, logits_BV: Tensor | None) -> None:
        """Give one sequence its new tokens, up to the one that ends it."""
        sequence, delta, reason, taken = sampled.chunk.sequence, "", None, 0
        num_best = sequence.params.logprobs
        for token_id in sampled.token_ids:
            if self._hash_logits:
                assert logits_BV is not None
                sequence.hash_logits(logits_BV[sampled.row + taken].cpu().numpy())
            if sequence.max_tokens == 0:
                self.end(sequence, "length")
                return
            sequence.token_ids.append(token_id)
            if num_best is not None:
                assert logits_BV is not None
                logits_V = logits_BV[sampled.row + taken]
                sequence.logprobs.append(logprobs(logits_V, token_id, num_best))
            delta += sequence.detokenizer.push(token_id)
            taken += 1
            if reason := self._finish_reason(sequence, token_id):
                break
        _account_drafts(sampled.chunk, taken)
        token_ids = tuple(sampled.token_ids[:taken])
        if reason:
            self.end(sequence, reason, delta, token_ids)
        else:
            self._put(sequence, delta, token_ids)

    def end(
        self, sequence: Sequence, reason: str, delta: str = "", token_ids: tuple[int, ...] = ()
    ) -> None:
        """Finish a sequence, for `stop`, `length` or `aborted`, with what it gained last."""
        sequence.finish_reason = reason
        delta += sequence.detokenizer.flush()
        self._scheduler.remove(sequence)
        self._announcer.request(sequence, "aborted" if reason == "aborted" else "finished")
        self._put(sequence, delta, token_ids)

    def abort(self, wanted: Collection[int] | None = None) -> None:
        """End those of the given requests that wait or run; None ends all."""
        for sequence in (*self._scheduler.running, *self._scheduler.waiting):
            if wanted is None or sequence.request_id in wanted:
                self.end(sequence, "aborted")

    def _finish_reason(self, sequence: Sequence, token_id: int) -> str | None:
        ends = token_id in self._eos_token_ids and not sequence.params.ignore_eos
        if ends or sequence.detokenizer.stopped:
            return "stop"
        return "length" if sequence.num_output >= sequence.max_tokens else None

    def _put(self, sequence: Sequence, delta: str, token_ids: tuple[int, ...]) -> None:
        self._announcer.text(sequence, delta)
        new, finished = len(token_ids) if sequence.logprobs else 0, sequence.is_finished
        self._unread.append(
            RequestOutput(
                sequence.request_id,
                sequence.label,
                delta,
                token_ids,
                tuple(sequence.logprobs[-new:]) if new else (),
                finished,
                completion_of(sequence) if finished else None,
            )
        )


def _account_drafts(chunk: Chunk, num_taken: int) -> None:
    """Count a step of a sequence that has a draft: what it took of its rows, and what was void."""
    sequence, proposal = chunk.sequence, chunk.proposal
    if sequence.draft is None:
        return
    sequence.draft.figures.steps += 1
    if proposal is None:
        return
    proposal.num_kept = num_taken
    sequence.draft.figures.proposed += proposal.num_drafts
    sequence.draft.figures.accepted += num_taken - 1
    sequence.num_computed += num_taken - 1
    sequence.high_water = max(sequence.high_water, sequence.num_computed)
    if chunk.num_void:
        sequence.extra_rows["rejected_draft"] += chunk.num_void
