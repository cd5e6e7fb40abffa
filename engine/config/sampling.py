"""How one request's next tokens are chosen."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config.checks import at_least, number, within
from engine.errors import ConfigError

MAX_SEED = 2**64 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request's next tokens are chosen and when it ends."""

    max_tokens: int | None = 64
    """Most new tokens; 0 only runs the prompt, None goes on to the model's longest text."""
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probabilities sum to at least this."""
    seed: int | None = None
    """Same seed, same prompt, same text; None derives one from the engine's seed."""
    stop: tuple[str, ...] = ()
    """Strings that end the text and are not part of it."""
    logprobs: int | None = None
    """Also return the n best log-probabilities at each position; None returns none."""
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            at_least("max_tokens", self.max_tokens, 0)
        at_least("top_k", self.top_k, 0)
        if not 0.0 <= number("temperature", self.temperature) <= 100.0:
            raise ConfigError(f"temperature ({self.temperature}) must lie between 0 and 100.")
        if not 0.0 < number("top_p", self.top_p) <= 1.0:
            raise ConfigError(f"top_p ({self.top_p}) must be above 0 and at most 1.")
        if self.seed is not None:
            within("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            within("logprobs", self.logprobs, 0, 20)
        if not isinstance(self.stop, tuple | list) or not all(
            isinstance(s, str) and s for s in self.stop
        ):
            raise ConfigError(f"stop ({self.stop!r}) must be a tuple of non-empty strings.")
