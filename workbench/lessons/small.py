"""A small engine that keeps a record: what the lessons run, and what one run leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from engine import Completion, Engine, EngineConfig, SamplingParams
from engine.errors import RequestError
from engine.events import Decision
from engine.model.tokenizer import Tokenizer
from engine.runtime.control import Control
from workbench import paths
from workbench.trace import Recorder, Trace
from workbench.traffic import corpus_prompts

Labelled = tuple[str, str]
"""(domain, text)."""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """What was run together, and the record of it."""

    completions: tuple[Completion, ...]
    """In the order of the prompts."""
    trace: Trace
    tokenizer: Tokenizer

    @property
    def text(self) -> str:
        """The prompt of the first request and what the model wrote after it."""
        first = self.completions[0]
        return self.tokenizer.decode([*first.prompt_token_ids, *first.token_ids])

    @property
    def tokens(self) -> list[str]:
        """The tokens of the first request as text, by position; the first is the model's mark."""
        first = self.completions[0]
        ids = [*first.prompt_token_ids, *first.token_ids]
        return [self.tokenizer.token(token_id) for token_id in ids]

    def decision(self, position: int, layer: int) -> Decision:
        """Return the whole recorded decision for one token of the first request in one layer.

        Raises:
            RequestError: that token was not watched, or not run, or the layer is none.
        """
        request = self.completions[0].request_id
        for decision in self.trace.decisions:
            if (decision.request_id, decision.position, decision.layer) == (
                request, position, layer
            ):  # fmt: skip
                return decision
        seen = sorted({d.position for d in self.trace.decisions if d.request_id == request})
        there = f"{seen[0]} to {seen[-1]}" if seen else "none"
        layers = self.trace.start.moe_layers
        raise RequestError(
            f"there is no decision for token {position} in layer {layer}; recorded in full are "
            f"tokens {there}, in layers {layers[0]} to {layers[-1]}."
        )


class SmallEngine:
    """An engine on one thread, with a recorder as its sink."""

    def __init__(self, model: str, num_devices: int) -> None:
        self._recorder = Recorder()
        config = EngineConfig(
            model=paths.model_folder(model), num_devices=num_devices, num_threads=1
        )
        self.engine = Engine(config, sink=self._recorder)

    @property
    def control(self) -> Control:
        """The door for bans, biases and tables; `banned` is the short way to one ban."""
        return self.engine.control

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to ids and back."""
        return self.engine.tokenizer

    @property
    def trace(self) -> Trace:
        """What has been recorded since the last run began."""
        return self._recorder.trace()

    def run(
        self,
        prompts: str | Sequence[Labelled],
        *,
        max_tokens: int = 16,
        temperature: float = 0.0,
        watch: bool | None = None,
        each_step: Callable[[], object] | None = None,
    ) -> Run:
        """Run one text, or several with their domains, together; forget earlier runs.

        Args:
            prompts: a text, or (domain, text) pairs.
            max_tokens: new tokens of each, an end of text among them; 0 only runs the prompts.
            temperature: 0 is greedy, so that the same prompt gives the same text.
            watch: whether every token's whole decision is kept; None keeps them for a single text.
            each_step: called after every step.

        Raises:
            RequestError: a prompt is empty or too long.
        """
        pairs = [("", prompts)] if isinstance(prompts, str) else list(prompts)
        keep = isinstance(prompts, str) if watch is None else watch
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, ignore_eos=True)
        self._recorder.clear()
        completions = self._together(pairs, params, keep, each_step)
        return Run(completions, self.trace, self.tokenizer)

    def ladder(
        self, text: str, batches: Sequence[int] = (1, 2, 4, 8, 16, 32), *, max_tokens: int = 24
    ) -> Run:
        """Run the same text once, then twice at once, four times …; keep all in one record.

        Raises:
            RequestError: the text is empty or too long.
        """
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self._recorder.clear()
        completions = [
            done
            for batch in batches
            for done in self._together([("", text)] * batch, params, False, None)
        ]
        return Run(tuple(completions), self.trace, self.tokenizer)

    @contextmanager
    def banned(self, layer: int | None, expert: int) -> Iterator[None]:
        """Within this, `expert` is never chosen in `layer` (None: in every layer).

        Afterwards the policy is what it was before.

        Raises:
            RoutingError: there is no such expert or layer.
        """
        before = self.control.policy
        self.control.ban_expert(layer, expert)
        try:
            yield
        finally:
            self.control.set_policy(before)

    def _together(
        self,
        pairs: Sequence[Labelled],
        params: SamplingParams,
        keep: bool,
        each_step: Callable[[], object] | None,
    ) -> tuple[Completion, ...]:
        waiting = [self._add(domain, text, params, keep) for domain, text in pairs]
        done: dict[int, Completion] = {}
        while self.engine.has_work:
            for output in self.engine.step():
                if output.completion is not None:
                    done[output.request_id] = output.completion
            if each_step is not None:
                each_step()
        return tuple(done[request] for request in waiting)

    def _add(self, domain: str, text: str, params: SamplingParams, keep: bool) -> int:
        watch = range(0)
        if keep:
            prompt = len(self.tokenizer.encode(text))
            # The last new token is written but not run: it has no decision.
            watch = range(max(prompt, prompt + (params.max_tokens or 0) - 1))
        return self.engine.add(text, params, label=domain, watch=watch)


def small_engine(model: str = paths.DEFAULT_MODEL, *, num_devices: int = 4) -> SmallEngine:
    """Start a recorded engine on one thread.

    Args:
        model: folder, or the name of a bundled model.
        num_devices: logical devices the experts are spread over.

    Raises:
        CheckpointError: the model folder is missing or damaged.
        ConfigError: the number of devices does not fit the model.
    """
    return SmallEngine(model, num_devices)


def mixed_prompts(per_domain: int = 6, *, seed: int = 0) -> list[Labelled]:
    """Return texts the model has not been trained on, as many of each domain, in a mixed order.

    Raises:
        ConfigError: the corpus is missing.
    """
    return [(prompt.domain, prompt.text) for prompt in corpus_prompts(per_domain, seed)]
