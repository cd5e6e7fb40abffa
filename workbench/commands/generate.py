"""`workbench generate`: run a prompt and show the text as it comes."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench import paths
from workbench.grouped import grouped
from workbench.options import (
    AskedDtypeOption,
    CapacityOption,
    DeterministicOption,
    DevicesOption,
    DraftOptions,
    JsonOption,
    ModelOption,
    PolicyOptions,
    PrecisionOption,
    RankOptions,
    SeedOption,
    ThresholdsOption,
    open_engine,
)
from workbench.output import print_json, say

if TYPE_CHECKING:
    from engine import SamplingParams
    from engine.events import Event, Sink
    from workbench.policy import Policy
    from workbench.trace import Recorder

PromptFileOption = Annotated[
    Path | None, typer.Option("--prompt-file", metavar="FILE", help="Read the prompt from it.")
]
TraceOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write all rows to a .moetrace file.")
]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextOptions:
    """What to continue, how far and how."""

    text: Annotated[
        str | None, typer.Argument(help="The prompt; - reads it from stdin.", show_default=False)
    ] = None
    prompt_file: PromptFileOption = None
    max_tokens: Annotated[int, typer.Option(help="Most new tokens; 0 only runs the prompt.")] = 64
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")] = 0
    top_p: Annotated[
        float, typer.Option(help="Keep the likeliest tokens up to this probability.")
    ] = 1.0
    seed: SeedOption = None
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End before this text; may be repeated."),
    ] = None

    def params(self) -> SamplingParams:
        """Return how to sample."""
        from engine import SamplingParams

        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            stop=tuple(self.stop or ()),
        )


@grouped
def generate(
    *,
    asked: TextOptions,
    model: ModelOption = paths.DEFAULT_MODEL,
    devices: DevicesOption = 1,
    ranks: RankOptions,
    dtype: AskedDtypeOption = None,
    precision: PrecisionOption = "model",
    thresholds: ThresholdsOption = None,
    drafts: DraftOptions,
    deterministic: DeterministicOption = False,
    trace: TraceOption = None,
    asked_of_gate: PolicyOptions,
    capacity_factor: CapacityOption = None,
    as_json: JsonOption = False,
) -> None:
    """Continue TEXT with the model and report how its tokens were routed.

    Standard output gets only what the model writes after TEXT; the report goes to standard error.
    """
    from workbench.prompts import read_prompt
    from workbench.trace.store import check_place

    prompt, params = read_prompt(asked.text, asked.prompt_file), asked.params()
    policy = asked_of_gate.policy()
    if trace is not None:
        check_place(trace)
    _run(
        prompt,
        params,
        policy,
        trace,
        as_json,
        model=model,
        dtype=dtype,
        devices=devices,
        deterministic=deterministic,
        precision=precision,
        thresholds=thresholds,
        ranks=ranks,
        drafts=drafts,
        capacity_factor=capacity_factor,
    )


def _run(
    prompt: str,
    params: SamplingParams,
    policy: Policy,
    trace: Path | None,
    as_json: bool,
    **engine_options: Any,
) -> None:
    """Continue the prompt on an engine of its own, show the text, report, keep the trace."""
    from engine.events import Tee
    from workbench import report
    from workbench.tally import Tally
    from workbench.trace import Recorder

    tally, recorder = Tally(), Recorder()
    heard: list[Sink] = [tally, *([recorder] if trace else []), *([] if as_json else [Printer()])]
    engine = open_engine(sink=Tee(heard), hash_logits=as_json, **engine_options)
    with closing(engine):
        policy.apply(engine)
        began = time.perf_counter()
        (completion,) = engine.generate([prompt], params)
        seconds = time.perf_counter() - began
        result = report.generation(completion, engine, tally, seconds)
    if as_json:
        print_json(result)
    else:
        print(flush=True)
        say(report.generation_summary(result, seconds))
    if trace is not None:
        _save(recorder, trace, quiet=as_json)


def _save(recorder: Recorder, file: Path, *, quiet: bool) -> None:
    """Write what was recorded; say so unless `quiet`, and what is missing in any case."""
    from workbench.trace.store import save

    recorded = recorder.trace()
    save(recorded, file)
    if recorded.dropped.steps:
        say(f"the first {recorded.dropped.steps} steps were too much for the trace's memory")
    if not quiet:
        say(f"trace with {recorded.num_rows} rows written to {file}")


class Printer:
    """A sink that writes text to stdout the moment it exists."""

    enabled = True

    def emit(self, event: Event) -> None:
        """Print the new characters of a text event."""
        from engine.events import TextEvent

        if isinstance(event, TextEvent) and event.delta:
            print(event.delta, end="", flush=True)
