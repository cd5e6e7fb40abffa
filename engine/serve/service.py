"""What the service does, whatever the protocol: checks a request, runs it, follows its caller.

HTTP and gRPC both stand on this; neither knows the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.config import MAX_SEED, SamplingParams
from engine.errors import WorkbenchError
from engine.runtime.admission import MAX_PRIORITY
from engine.runtime.telemetry import Telemetry
from engine.serve import errors
from engine.serve.audit import Entry
from engine.serve.chat import ChatFormat
from engine.serve.config import ServeConfig
from engine.serve.errors import ApiError, invalid
from engine.serve.journal import Journal
from engine.serve.loop import Call, EngineLoop, Piece, Spec
from engine.serve.monitor import Monitor
from engine.serve.routing import Wish
from engine.serve.schemas import RoutingOptions

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Work:
    """A checked request: what to run for it."""

    prompts: tuple[tuple[int, ...], ...]
    specs: list[Spec]
    """`n` for each prompt, in the prompts' order."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts together, each counted once."""
        return sum(map(len, self.prompts))


@dataclass(slots=True)
class Asked:
    """One request, in words all protocols share."""

    model: str
    prompts: Sequence[Prompt]
    params: SamplingParams
    n: int = 1
    routing: bool | RoutingOptions | None = None
    priority: int = 0
    """Smaller is more urgent."""
    label: str = "http"
    """A word for those who watch."""
    fields: dict[str, str] = field(default_factory=dict)
    """Our name of a field -> what the protocol calls it, for refusals."""

    def called(self, name: str) -> str:
        """Return what the caller knows a field as."""
        return self.fields.get(name, name)


class Service:
    """One engine and all that stands between it and its callers."""

    def __init__(
        self,
        config: ServeConfig,
        loop: EngineLoop,
        monitor: Monitor,
        chat: ChatFormat,
        telemetry: Telemetry,
        journal: Journal,
    ) -> None:
        self.config, self.engine, self.loop = config, loop.engine, loop
        self.monitor, self.health, self.chat = monitor, monitor.health, chat
        self.telemetry, self.journal = telemetry, journal
        self.created = int(time.time())
        tokenizer = self.engine.tokenizer
        self._longest_token = max(
            len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)
        )

    def reason(self) -> str | None:
        """Return why a request would not be served now; None when it would."""
        if self.loop.error is not None:
            return f"the engine has stopped: {self.loop.error}"
        return self.health.reason()

    async def prepare(self, asked: Asked) -> Work:
        """Check a request against every limit and turn its prompts into tokens.

        Raises:
            ApiError: it is refused.
        """
        if asked.model != self.config.model_name:
            raise ApiError(
                404, "This service has no such model.", code="model_not_found", param="model"
            )
        limits = self.config.limits
        if not 1 <= len(asked.prompts) * asked.n <= limits.outputs:
            raise invalid(
                f"A call may ask for 1 to {limits.outputs} completions, prompts times n.",
                asked.called("n") if asked.prompts else asked.called("prompt"),
            )
        self._check_stops(asked)
        if not -MAX_PRIORITY <= asked.priority <= MAX_PRIORITY:
            raise invalid(
                f"A priority is a number from -{MAX_PRIORITY} to {MAX_PRIORITY}; smaller is more "
                "urgent.",
                asked.called("priority"),
            )
        wish = self._wish(asked)
        prompts = tuple([await self._token_ids(prompt, asked) for prompt in asked.prompts])
        specs = []
        for token_ids in prompts:
            params = self._with_room(len(token_ids), asked)
            specs += [
                Spec(token_ids, _nth(params, index), wish, asked.label, asked.priority)
                for index in range(asked.n)
            ]
        self._check_wish(specs, asked)
        return Work(prompts, specs)

    def submit(self, work: Work, entry: Entry) -> Call:
        """Queue the work; the caller follows the call and says `leave` however that ends.

        `entry` is the call's line in the audit log.

        Raises:
            ApiError: the service is ending or overloaded.
        """
        entry.input_tokens = work.num_prompt_tokens
        return self.loop.submit(work.specs)

    async def follow(self, call: Call, entry: Entry) -> AsyncIterator[Piece]:
        """Yield what the call's completions gain until all have ended; account it in `entry`.

        Raises:
            ApiError: the engine failed under it, or the service ends in a hurry.
        """
        left = call.size
        while left:
            item = await call.arrived.get()
            if isinstance(item, ApiError):
                raise item
            if (completion := item.output.completion) is not None:
                left -= 1
                entry.account(completion)
                if completion.finish_reason == "aborted":
                    raise errors.draining()
            yield item

    def leave(self, call: Call) -> None:
        """End what is left of a call, if anything is; every caller says so when it is through."""
        self.loop.abort(call)

    async def gather(self, call: Call, entry: Entry) -> list[Piece]:
        """Return the last piece of each completion, in order."""
        last: dict[int, Piece] = {}
        async for piece in self.follow(call, entry):
            if piece.output.finished:
                last[piece.index] = piece
        return [last[index] for index in sorted(last)]

    def _check_stops(self, asked: Asked) -> None:
        limits, stops = self.config.limits, asked.params.stop
        if len(stops) > limits.stops or any(len(stop) > limits.stop_chars for stop in stops):
            raise invalid(
                f"At most {limits.stops} stop strings of {limits.stop_chars} characters each.",
                asked.called("stop"),
            )

    async def _token_ids(self, prompt: Prompt, asked: Asked) -> tuple[int, ...]:
        name, limit = asked.called("prompt"), self.engine.max_model_len
        if not prompt:
            raise invalid("A prompt needs at least one character or token.", name, "empty_prompt")
        if not isinstance(prompt, str):
            vocab_size = self.engine.model_config.vocab_size
            if not all(type(token) is int and 0 <= token < vocab_size for token in prompt):
                raise invalid(f"Token ids must lie between 0 and {vocab_size - 1}.", name)
            return tuple(prompt)
        try:
            size = len(prompt.encode())
        except UnicodeEncodeError:
            raise invalid("A prompt must be valid UTF-8.", name) from None
        if size > limit * self._longest_token:
            raise _too_long(limit, name)  # whatever its tokens are, there are more of them
        encode = self.engine.tokenizer.encode
        ids = encode(prompt) if size < 4096 else await asyncio.to_thread(encode, prompt)
        bos = self.engine.model_config.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]  # the template wrote one and the tokenizer another
        if not ids:
            raise invalid("The tokenizer leaves nothing of the prompt.", name, "empty_prompt")
        return tuple(ids)

    def _with_room(self, num_prompt: int, asked: Asked) -> SamplingParams:
        """Hold prompt and output against the model's length and the cache."""
        engine = self.engine
        cache = engine.config.num_blocks * engine.config.block_size
        limit = min(engine.max_model_len, cache)
        if num_prompt > limit:
            raise _too_long(limit, asked.called("prompt"))
        room = limit - num_prompt
        wanted = room if asked.params.max_tokens is None else asked.params.max_tokens
        if wanted > room:
            raise _too_long(limit, asked.called("max_tokens"))
        return replace(asked.params, max_tokens=wanted)

    def _wish(self, asked: Asked) -> Wish | None:
        options = asked.routing
        if not options:
            return None
        model = self.engine.model_config
        if isinstance(options, bool):
            options = RoutingOptions()
        chosen = model.moe_layers if options.layers is None else options.layers
        known = {layer: index for index, layer in enumerate(model.moe_layers)}
        if not set(chosen) <= known.keys() or len(set(chosen)) != len(chosen):
            raise invalid(
                f"routing.layers must be different MoE layers of this model, which has "
                f"{len(known)}, the last with number {max(known, default=-1)}.",
                "routing",
            )
        return Wish(tuple(known[one] for one in chosen), options.tokens, options.encodings)

    def _check_wish(self, specs: list[Spec], asked: Asked) -> None:
        model, limit = self.engine.model_config, self.config.limits.routed_ids
        rows = sum(len(spec.token_ids) + (spec.params.max_tokens or 0) for spec in specs)
        if asked.routing and rows * len(model.moe_layers) * model.top_k > limit:
            raise invalid(
                f"routing is told for at most {limit} expert ids a call; ask for fewer tokens.",
                "routing",
            )


def sampling(name: str = "max_tokens", **options: Any) -> SamplingParams:
    """Return sampling options, or refuse them in fixed words.

    Raises:
        ApiError: one is not allowed.
    """
    try:
        return SamplingParams(**options)
    except WorkbenchError:
        raise invalid("A sampling option has a value that is not allowed.", name) from None


def _nth(params: SamplingParams, index: int) -> SamplingParams:
    """Return the options of a prompt's nth completion: each draws by a seed of its own."""
    if params.seed is None or index == 0:
        return params
    return replace(params, seed=(params.seed + index) & MAX_SEED)


def _too_long(limit: int, param: str) -> ApiError:
    return invalid(
        f"This model takes at most {limit} tokens, prompt and completion together; shorten the "
        "prompt or lower max_tokens.",
        param,
        "context_length_exceeded",
    )
