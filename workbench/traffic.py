"""Mixed traffic: prompts from the corpus's held-out texts, so many running at a time.

Held-out texts are ones the bundled model has not been trained on. The same seed gives the same
prompts in the same order.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING

from engine.errors import ConfigError

if TYPE_CHECKING:
    from engine import Engine, SamplingParams
    from engine.runtime.engine import RequestOutput

ALL = "all"
"""The name of all domains together."""
TEXTS_PER_DOMAIN = 24
PROMPT_CHARACTERS = 90
_WIDE_CHARACTERS = 36
"""Length of a prompt in a script that writes a word with one or two characters."""
BEGINNING_CHARACTERS = 420
"""Length of what the prompts of one client begin with."""
NEW_TOKENS = (64, 144)
"""Fewest and most new tokens of a request."""
MAX_RUNNING = 64
WATCHED_TOKENS = 96
"""Tokens of a watched request whose whole decisions are recorded, from its first."""
OWN_TEXT, OWN_TOKENS = "yours", 32
"""Label and new tokens of a text that a reader has written."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to go on from, and the domain it is from."""

    domain: str
    text: str


def corpus_prompts(texts: int = TEXTS_PER_DOMAIN, seed: int = 0) -> list[Prompt]:
    """Return excerpts of held-out texts of every domain, in a mixed order.

    Raises:
        ConfigError: the corpus is missing.
    """
    from engine.train.data import DOMAINS

    rng = random.Random(seed)
    by_domain = [
        deque(Prompt(domain, excerpt(text, rng)) for text in _heldout(domain, texts))
        for domain in DOMAINS
    ]
    mixed: list[Prompt] = []
    while any(by_domain):
        # One of each domain a round, in a new order each time: any stretch of traffic is mixed.
        round_ = [queue.popleft() for queue in by_domain if queue]
        rng.shuffle(round_)
        mixed += round_
    if not mixed:
        raise ConfigError("the corpus holds no held-out text; rebuild it with engine.train.corpus.")
    return mixed


@cache
def _heldout(domain: str, texts: int) -> tuple[str, ...]:
    from engine.train.data import documents

    return tuple(document.text for document in islice(documents(domain, "heldout"), texts))


def beginning_alike(prompts: Sequence[Prompt], beginnings: int) -> list[Prompt]:
    """Return the prompts behind a few long beginnings, as the instructions of that many clients.

    With 12 beginnings the prompts 0, 12, 24, … begin with the same `BEGINNING_CHARACTERS`.
    """
    # A letter of other scripts may be several tokens, and no text may outgrow the model.
    text = "\n".join(prompt.text for prompt in prompts if prompt.text.isascii())
    pieces = [
        text[at * BEGINNING_CHARACTERS : (at + 1) * BEGINNING_CHARACTERS]
        for at in range(beginnings)
    ]
    return [
        Prompt(prompt.domain, f"{pieces[number % beginnings]}\n{prompt.text}")
        for number, prompt in enumerate(prompts)
    ]


def excerpt(text: str, rng: random.Random) -> str:
    """Return a piece of `text` that starts at the start of a line and ends between words."""
    lines = [match.start() for match in re.finditer(r"^(?=\S)", text, re.MULTILINE)]
    early = [at for at in lines if at + PROMPT_CHARACTERS <= len(text)] or [0]
    piece = text[rng.choice(early) :]
    wide = sum(ord(character) > 0x2E80 for character in piece[:40]) > 20
    length = _WIDE_CHARACTERS if wide else PROMPT_CHARACTERS
    if len(piece) <= length:
        return piece.rstrip() or text[:length]
    cut = piece[:length]
    return cut if wide else (cut.rpartition(" ")[0].rstrip() or cut)


class Traffic:
    """Keeps an engine busy with `running` requests at a time."""

    def __init__(self, prompts: Sequence[Prompt], running: int, seed: int = 0) -> None:
        self.paused = False
        """While set, no new requests are added; those that run go on to their ends."""
        self.running = 0
        """Requests kept going; those that are too many end by themselves."""
        self.domain: str | None = None
        """Only prompts of this domain are added; None mixes all."""
        self._prompts = prompts
        self._rng = random.Random(seed)
        self._added = 0
        self._alive: set[int] = set()
        self.choose(running=running)

    @property
    def domains(self) -> tuple[str, ...]:
        """The domains there are prompts of, in the order of their names."""
        return tuple(sorted({prompt.domain for prompt in self._prompts}))

    @property
    def num_alive(self) -> int:
        """Requests that were added and have not ended."""
        return len(self._alive)

    def choose(
        self,
        *,
        paused: bool | None = None,
        running: int | None = None,
        domain: str | None = None,
    ) -> None:
        """Change what is added from now on; what is None stays. Domain "all" mixes all.

        Raises:
            ConfigError: a value that is not allowed; nothing is changed then.
        """
        if running is not None and not 1 <= running <= MAX_RUNNING:
            raise ConfigError(f"running ({running}) must be at least 1 and at most {MAX_RUNNING}.")
        if domain is not None and domain not in (ALL, *self.domains):
            raise ConfigError(
                f"domain ({domain!r}) must be {ALL!r} or one of {', '.join(self.domains)}."
            )
        self.paused = self.paused if paused is None else paused
        self.running = self.running if running is None else running
        self.domain = (None if domain == ALL else domain) if domain else self.domain

    def step(self, engine: Engine) -> bool:
        """Add what is missing and run one step; return whether there was anything to do."""
        self.fill(engine)
        if not engine.has_work:
            return False
        self.settle(engine.step())
        return True

    def fill(self, engine: Engine) -> None:
        """Add the requests that are missing, unless paused."""
        while len(self._alive) < self.running and not self.paused:
            prompt = self._next()
            self._alive.add(engine.add(prompt.text, self._params(), label=prompt.domain))

    def settle(self, outputs: Sequence[RequestOutput]) -> None:
        """Note which requests have ended; for a caller who runs the steps itself."""
        for output in outputs:
            if output.finished:
                self._alive.discard(output.request_id)

    def watch(self, engine: Engine, text: str | None = None) -> int:
        """Add one request at once whose decisions are recorded in full; return its id.

        Args:
            engine: takes it, beside those that run.
            text: what to go on from, greedily; None takes the next prompt.

        Raises:
            RequestError: the text is empty or too long.
        """
        from engine import SamplingParams

        if text is None:
            prompt, params = self._next(), self._params()
        else:
            prompt = Prompt(OWN_TEXT, text)
            params = SamplingParams(max_tokens=OWN_TOKENS, temperature=0.0)
        length = len(engine.tokenizer.encode(prompt.text)) + (params.max_tokens or 0)
        return engine.add(
            prompt.text, params, label=prompt.domain, watch=range(min(WATCHED_TOKENS, length))
        )

    def _next(self) -> Prompt:
        """Return the next prompt of the chosen domain."""
        for _ in range(len(self._prompts)):
            prompt = self._prompts[self._added % len(self._prompts)]
            self._added += 1
            if self.domain in (None, prompt.domain):
                return prompt
        raise AssertionError(f"no prompt of {self.domain}")

    def _params(self) -> SamplingParams:
        from engine import SamplingParams

        return SamplingParams(
            max_tokens=self._rng.randint(*NEW_TOKENS),
            temperature=0.8,
            top_p=0.95,
            seed=self._rng.getrandbits(31),
        )
