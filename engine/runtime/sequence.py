"""One request on its way through the engine."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from engine.config import SamplingParams
from engine.events import Int64
from engine.model.detokenizer import Detokenizer
from engine.model.sampler import Logprobs
from engine.runtime.draft.proposal import DraftState
from engine.runtime.prefix import Chain

if TYPE_CHECKING:
    from hashlib import _Hash

Position = int


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, cache blocks and progress of one request."""

    request_id: int
    label: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    """The limit in force: `params.max_tokens`, or what the model's length leaves."""
    seed: int
    home: int
    """The device whose attention owns this sequence."""
    watch: frozenset[Position]
    """Positions whose whole decision is recorded."""
    detokenizer: Detokenizer
    priority: int = 0
    """Smaller is more urgent."""
    due_s: float = 0.0
    """When it arrived, by the machine's clock, moved by its priority."""
    token_ids: list[int] = field(init=False)
    """Prompt and output."""
    num_computed: int = 0
    """Tokens whose keys and values are in the cache."""
    high_water: int = 0
    """Tokens that were ever computed or reused; rows below it run again after a preemption."""
    num_reused: int = 0
    """Of them, prompt tokens that another request had computed when this one began."""
    chain: Chain | None = None
    """By what its full blocks are known; None until it begins, or while they cannot be shared."""
    rerun_cause: str = "preemption"
    """Why its rows below `high_water` run again, one of `engine.events.CAUSES`."""
    blocks: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[Logprobs] = field(default_factory=list)
    extra_rows: Counter[str] = field(default_factory=Counter)
    last_experts: tuple[Position, Int64] | None = None
    """While smoothing is on: a token's position, and (L, E) how many tokens before the next one
    each expert was last used."""
    logits_hash: _Hash | None = None
    draft: DraftState | None = None
    """What its draft knows; None without one."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def num_output(self) -> int:
        """How many tokens were generated."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended, for whatever reason."""
        return self.finish_reason is not None

    def hash_logits(self, logits_V: np.ndarray) -> None:
        """Add the (V,) fp32 logits of one sampled position to the request's SHA-256."""
        if self.logits_hash is None:
            self.logits_hash = hashlib.sha256()
        self.logits_hash.update(logits_V.tobytes())
