"""What an operator has before them: an engine under traffic, its recent past, known answers.

The session asks for more of it and judges it; nothing here knows what a drill has broken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from workbench.drills.probes import Readings
from workbench.drills.window import Window
from workbench.traffic import Prompt, Traffic, corpus_prompts

if TYPE_CHECKING:
    from engine import Engine
    from engine.runtime.engine import RequestOutput

PATIENCE_STEPS = 400
"""Steps run at most to gather rows."""
QUESTIONS = 12
"""Texts asked about; each is cut at `CUTS` places."""
CUTS = (0.4, 0.6, 0.8, 1.0)
_KNOWN = "known"


class Evidence:
    """Runs the engine's steps and reads what they leave."""

    def __init__(
        self,
        engine: Engine,
        window: Window,
        planned: Sequence[Mapping[str, object]],
        *,
        running: int,
        seed: int,
    ) -> None:
        """Take charge of the engine's steps.

        Args:
            engine: under traffic while this is asked for more.
            window: what it records.
            planned: the change record, read as it grows; its last entry is the newest.
            running: requests kept going.
            seed: of the prompts and of the known questions.
        """
        prompts = corpus_prompts(seed=seed)
        self._engine, self._window, self._planned = engine, window, planned
        self._traffic = Traffic(prompts, running, seed)
        self._questions = _questions(engine, prompts)
        self._known: tuple[int, ...] = ()

    def step(self) -> list[RequestOutput]:
        """Run one step of traffic."""
        self._traffic.fill(self._engine)
        outputs = self._engine.step()
        self._traffic.settle(outputs)
        return outputs

    def gather(self, rows: int, tell: Callable[[int], None] = lambda have: None) -> None:
        """Run traffic until the window holds enough rows, within patience; tell how many it has."""
        for _ in range(PATIENCE_STEPS):
            have = self._window.num_rows
            tell(min(have, rows))
            if have >= rows:
                return
            self.step()

    def clear(self) -> None:
        """Begin anew: what was recorded before a change says nothing about it."""
        self._window.clear()

    def write_down_answers(self) -> None:
        """Ask every question and keep the answers as the right ones."""
        self._known = tuple(self.ask())

    def ask(self) -> list[int]:
        """Ask every question beside the traffic; return the first token of each answer."""
        from engine import SamplingParams

        one = SamplingParams(max_tokens=1, ignore_eos=True)
        waiting = [self._engine.add(question, one, label=_KNOWN) for question in self._questions]
        given: dict[int, int] = {}
        with self._window.closed():
            while len(given) < len(waiting):
                for output in self.step():
                    if output.completion and output.label == _KNOWN:
                        given[output.request_id] = output.completion.token_ids[0]
        return [given[request_id] for request_id in waiting]

    def readings(self) -> Readings:
        """Return what an operator has before them now."""
        return Readings(
            trace=self._window.trace(),
            table=self._engine.table,
            planned=self._planned[-1],
            ask=self.ask,
            known=self._known,
        )


def _questions(engine: Engine, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return beginnings of the first texts; what follows each is a known question."""
    questions = []
    for prompt in prompts[:QUESTIONS]:
        tokens = engine.tokenizer.encode(prompt.text)
        questions += [tokens[: max(2, round(len(tokens) * cut))] for cut in CUTS]
    return questions
