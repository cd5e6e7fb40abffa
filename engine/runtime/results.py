"""What the engine hands back: progress after each step, a completion at the end, and its state."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from engine.model.sampler import Logprobs
from engine.routing.speculation import Figures
from engine.runtime.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request."""

    request_id: int
    label: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    """`stop` (end of text or a stop string), `length` or `aborted`."""
    logprobs: tuple[Logprobs, ...]
    """One per token when asked for, else empty."""
    logits_sha256: str | None
    """Over the fp32 logits of every sampled position, when `hash_logits` is set."""
    rows: int
    """Rows that ran for the first time: prompt + output - 1, or the prompt without output; less
    `reused_tokens`."""
    extra_rows: dict[str, int]
    """Rows run again, by cause."""
    reused_tokens: int = 0
    """Prompt tokens that were not run, because the KV cache held them."""
    draft: Figures | None = None
    """How its draft fared, see `engine.routing.speculation.DEFINITION`; None without a draft."""
    draft_switched: tuple[tuple[int, bool], ...] = ()
    """At how many generated tokens drafting was switched off (False) or on for it."""


@dataclass(slots=True)
class RequestOutput:
    """What one request gained in one step."""

    request_id: int
    label: str
    delta: str
    """New text, safe to show: no half characters, no piece of a stop string."""
    token_ids: tuple[int, ...]
    """New tokens."""
    logprobs: tuple[Logprobs, ...]
    """Of the new tokens, when asked for, else empty."""
    finished: bool
    completion: Completion | None
    """The whole request, once it has finished."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """How busy the engine is."""

    steps: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_blocks: int
    bad_rows: int
    dropped_slots: tuple[int, ...] = ()
    """By MoE layer: (token, expert) slots that found no room; () without a capacity factor."""
    deciding: dict[str, Any] = field(default_factory=dict)
    """What deciding costs, level by level, see `engine.runtime.deciding`."""
    num_kept_blocks: int = 0
    """Of the free blocks, those kept because a request may begin with what they hold."""
    prefix_queries: int = 0
    """Tokens of requests that began, looked up in the cache."""
    prefix_hits: int = 0
    """Of those, the tokens that were found and not run."""
    draft: dict[str, Any] | None = None
    """How the draft fared over all requests, see `Drafter.as_dict`; None without one."""

    def as_dict(self) -> dict[str, Any]:
        """Return the figures by name."""
        return asdict(self)


def completion_of(sequence: Sequence) -> Completion:
    """Close the books of a finished sequence."""
    assert sequence.finish_reason is not None, "the sequence still runs"
    digest = sequence.logits_hash
    return Completion(
        request_id=sequence.request_id,
        label=sequence.label,
        prompt_token_ids=tuple(sequence.prompt_token_ids),
        token_ids=tuple(sequence.output_token_ids),
        text=sequence.detokenizer.text,
        finish_reason=sequence.finish_reason,
        logprobs=tuple(sequence.logprobs),
        logits_sha256=digest.hexdigest() if digest else None,
        rows=sequence.high_water - sequence.num_reused,
        extra_rows=dict(sequence.extra_rows),
        reused_tokens=sequence.num_reused,
        draft=sequence.draft.figures if sequence.draft else None,
        draft_switched=tuple(sequence.draft.track.switched) if sequence.draft else (),
    )
