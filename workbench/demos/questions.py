"""Known questions: beginnings of held-out texts, of which the next token is known.

They run beside the traffic as requests of one token each, so that they meet the routing that is in
force, and cost what such requests cost.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from workbench.traffic import Prompt

if TYPE_CHECKING:
    from engine import Engine
    from engine.runtime.engine import RequestOutput

CUTS = (0.4, 0.6, 0.8, 0.95)
"""Where each text is cut, in parts of its length."""


class Questions:
    """Asks about the texts of one domain at a time, and compares with the answers at the start."""

    def __init__(self, engine: Engine, prompts: Sequence[Prompt], domains: Collection[str]) -> None:
        self._engine = engine
        self._questions = {domain: list(_cuts(engine, prompts, domain)) for domain in domains}
        self._at_start: dict[str, float] = {}
        self._right: dict[str, float] = {}
        self._domain: str | None = None
        self._wanted: dict[int, int] = {}
        self._hits = 0

    @property
    def domains(self) -> tuple[str, ...]:
        """What can be asked about."""
        return tuple(self._questions)

    def answered(self, domain: str) -> bool:
        """Say whether the answers are there; begins to ask where they are not."""
        if domain in self._right:
            return True
        if self._domain is None:
            self._ask(domain)
        return False

    def kept(self, domain: str) -> float | None:
        """Return the share foreseen over that at the start; None until the answers are there."""
        if not self.answered(domain):
            return None
        base = self._at_start.get(domain, 0.0)
        return self._right[domain] / base if base else None

    def remember(self) -> None:
        """Take the answers at hand for those at the start."""
        self._at_start = dict(self._right)

    def forget(self) -> None:
        """Drop the answers, and the questions under way."""
        for request_id in self._wanted:
            self._engine.abort(request_id)
        self._wanted, self._domain = {}, None
        self._right = {}

    def take(self, outputs: Sequence[RequestOutput]) -> None:
        """Look for answers among a step's outputs."""
        for output in outputs:
            if output.completion is not None and output.request_id in self._wanted:
                wanted = self._wanted.pop(output.request_id)
                self._hits += output.completion.token_ids[0] == wanted
        if self._domain is not None and not self._wanted:
            self._right[self._domain] = self._hits / len(self._questions[self._domain])
            self._domain = None

    def _ask(self, domain: str) -> None:
        from engine import SamplingParams

        self._domain, self._hits = domain, 0
        one = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        for question, answer in self._questions[domain]:
            self._wanted[self._engine.add(question, one, label=domain)] = answer


def _cuts(engine: Engine, prompts: Sequence[Prompt], domain: str) -> list[tuple[list[int], int]]:
    """Return beginnings of the domain's texts and the token that follows each."""
    questions = []
    for prompt in prompts:
        if prompt.domain == domain:
            ids = engine.tokenizer.encode(prompt.text)
            for cut in CUTS:
                at = min(len(ids) - 1, max(3, round(len(ids) * cut)))
                questions.append((ids[:at], ids[at]))
    return questions
