"""Check a request at the door, so that nothing inside can meet one that does not fit."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from engine.config import EngineConfig, SamplingParams
from engine.errors import RequestError
from engine.model.detokenizer import Detokenizer
from engine.model.tokenizer import Tokenizer
from engine.runtime.sequence import Sequence

MAX_PRIORITY = 100
_SEED_STRIDE = 1_000_003


@dataclass(frozen=True, slots=True)
class Admission:
    """The limits of one engine, and the door that keeps them."""

    config: EngineConfig
    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int
    """Longest prompt + output, in tokens."""
    homes: Callable[[], SequenceOf[int]]
    """The devices that can own a sequence, now."""
    _ids: Iterator[int] = field(default_factory=itertools.count)

    def admit(
        self,
        prompt: str | SequenceOf[int],
        params: SamplingParams | None = None,
        *,
        request_id: int | None = None,
        label: str = "",
        watch: SequenceOf[int] = (),
        priority: int = 0,
    ) -> Sequence:
        """Turn a request into a sequence; without params greedy, without an id the next one.

        Raises:
            RequestError: the prompt is empty, too long with its output, or holds a bad token id;
                or a watched position lies outside the prompt and its output; or the priority is no
                whole number from -MAX_PRIORITY to MAX_PRIORITY.
        """
        params = params or SamplingParams()
        request_id = next(self._ids) if request_id is None else request_id
        token_ids = self._token_ids(prompt)
        max_tokens = self._max_tokens(len(token_ids), params)
        length = len(token_ids) + max_tokens
        self._check_memory(length)
        for position in watch:
            if type(position) is not int or not 0 <= position < length:
                raise RequestError(
                    f"watched token ({position!r}) must lie between 0 and {length - 1}, the tokens "
                    "of this request."
                )
        if type(priority) is not int or not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            raise RequestError(
                f"priority ({priority!r}) must be a whole number between -{MAX_PRIORITY} and "
                f"{MAX_PRIORITY}; smaller is more urgent."
            )
        seed = params.seed
        if seed is None:
            seed = self.config.seed * _SEED_STRIDE + max(request_id, 0)
        return Sequence(
            request_id=request_id,
            label=label,
            prompt_token_ids=token_ids,
            params=params,
            max_tokens=max_tokens,
            seed=seed,
            home=self._home(request_id),
            watch=frozenset(watch),
            detokenizer=Detokenizer(self.tokenizer, params.stop),
            priority=priority,
            due_s=time.monotonic() + priority * self.config.priority_step_s,
        )

    def _home(self, request_id: int) -> int:
        homes = self.homes()
        return homes[request_id % len(homes)]

    def _token_ids(self, prompt: str | SequenceOf[int]) -> list[int]:
        if isinstance(prompt, str):
            return self._encoded(prompt)
        try:
            token_ids = list(prompt)
        except TypeError:
            raise RequestError(
                f"the prompt ({prompt!r}) must be text or a list of token ids."
            ) from None
        if not token_ids:
            raise RequestError("the prompt has no token ids; give at least one.")
        last = self.vocab_size - 1
        for token in token_ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= last:
                raise RequestError(
                    f"token id ({token!r}) must be a whole number between 0 and {last}."
                )
        return token_ids

    def _encoded(self, text: str) -> list[int]:
        if not text:
            raise RequestError("the prompt is empty; give at least one character of text.")
        try:
            text.encode()
        except UnicodeEncodeError as wrong:
            raise RequestError(
                f"the prompt is not UTF-8 at character {wrong.start}; pass UTF-8 text."
            ) from None
        token_ids = self.tokenizer.encode(text)
        if not token_ids:
            raise RequestError(f"the tokenizer leaves nothing of the prompt ({text!r:.40}).")
        return token_ids

    def _max_tokens(self, num_prompt: int, params: SamplingParams) -> int:
        """Return the limit in force, or refuse what the model's length does not leave."""
        limit = self.max_model_len
        if num_prompt > limit:
            raise RequestError(
                f"the prompt has {num_prompt} tokens; this model takes at most {limit}. Shorten it."
            )
        room = limit - num_prompt
        max_tokens = room if params.max_tokens is None else params.max_tokens
        if max_tokens > room:
            raise RequestError(
                f"prompt ({num_prompt} tokens) and max_tokens ({max_tokens}) together exceed "
                f"{limit}, the longest text this model takes; use max_tokens of at most {room}."
            )
        return max_tokens

    def _check_memory(self, num_tokens: int) -> None:
        size, available = self.config.block_size, self.config.num_blocks
        needed = -(-num_tokens // size)
        if needed > available:
            raise RequestError(
                f"the request needs {needed} cache blocks of {size} tokens; this engine has "
                f"{available}. Shorten it or raise num_blocks."
            )
