"""Check a request at the door, so that nothing inside can meet one that does not fit."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from engine.config import SamplingParams
from engine.errors import RequestError
from engine.model.detokenizer import Detokenizer
from engine.runtime.sequence import Sequence

if TYPE_CHECKING:
    from engine.runtime.engine import Engine

_SEED_STRIDE = 1_000_003


def admit(
    engine: Engine,
    prompt: str | SequenceOf[int],
    params: SamplingParams,
    *,
    request_id: int,
    label: str = "",
    watch: SequenceOf[int] = (),
) -> Sequence:
    """Turn a request into a sequence.

    Raises:
        RequestError: the prompt is empty, too long with its output, or holds a bad token id; or a
            watched position lies outside the prompt and its output.
    """
    token_ids = _token_ids(engine, prompt)
    limit = engine.max_model_len
    if len(token_ids) > limit:
        raise RequestError(
            f"the prompt has {len(token_ids)} tokens; this model takes at most {limit}. Shorten it."
        )
    room = limit - len(token_ids)
    max_tokens = room if params.max_tokens is None else params.max_tokens
    if max_tokens > room:
        raise RequestError(
            f"prompt ({len(token_ids)} tokens) and max_tokens ({max_tokens}) together exceed "
            f"{limit}, the longest text this model takes; use max_tokens of at most {room}."
        )
    _check_memory(engine, len(token_ids) + max_tokens)
    for position in watch:
        if not 0 <= position < len(token_ids) + max_tokens:
            raise RequestError(
                f"watched token ({position}) must lie between 0 and "
                f"{len(token_ids) + max_tokens - 1}, the tokens of this request."
            )
    seed = params.seed
    if seed is None:
        seed = engine.config.seed * _SEED_STRIDE + max(request_id, 0)
    return Sequence(
        request_id=request_id,
        label=label,
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=token_ids,
        params=params,
        max_tokens=max_tokens,
        seed=seed,
        home=request_id % engine.config.num_devices,
        watch=frozenset(watch),
        detokenizer=Detokenizer(engine.tokenizer, params.stop),
    )


def _token_ids(engine: Engine, prompt: str | SequenceOf[int]) -> list[int]:
    if isinstance(prompt, str):
        if not prompt:
            raise RequestError("the prompt is empty; give at least one character of text.")
        return engine.tokenizer.encode(prompt)
    token_ids = list(prompt)
    if not token_ids:
        raise RequestError("the prompt has no token ids; give at least one.")
    last = engine.model_config.vocab_size - 1
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id <= last:
            raise RequestError(
                f"token id ({token_id!r}) must be a whole number between 0 and {last}."
            )
    return token_ids


def _check_memory(engine: Engine, num_tokens: int) -> None:
    config = engine.config
    needed = -(-num_tokens // config.block_size)
    if needed > config.num_blocks:
        raise RequestError(
            f"the request needs {needed} cache blocks of {config.block_size} tokens; this engine "
            f"has {config.num_blocks}. Shorten it or raise num_blocks."
        )
