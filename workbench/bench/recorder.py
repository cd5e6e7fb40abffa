"""What recording costs: the same steps with and without it, in turns.

Two engines run the same prompts, one with no sink, one with a `Recorder`. Step i of one is followed
by step i of the other, and who goes first changes every time, so that whatever else the machine
does hits both. Both run the same rows; the row count of the trace is checked against the prompts'.

On a busy machine the wall clock measures the neighbours, so processor time is compared as well;
with one thread it is the engine's own work.
"""

from __future__ import annotations

import gc
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

from engine import Engine, EngineConfig, SamplingParams
from engine.errors import RequestError
from engine.events import NullSink
from workbench.bench.machine import report, torch_threads
from workbench.trace import Recorder

PROMPT_TOKENS = 8


class Milliseconds(NamedTuple):
    """How long one step took."""

    wall: float
    cpu: float
    """Processor time of all threads."""


Pair = tuple[Milliseconds, Milliseconds]
"""One step without recording and the same step with it."""


def run(
    model: Path,
    *,
    batches: tuple[int, ...] = (1, 8, 32),
    tokens: int = 64,
    rounds: int = 3,
    threads: int | None = 1,
) -> dict[str, Any]:
    """Measure one row per batch size.

    Args:
        model: folder.
        batches: numbers of sequences run together.
        tokens: decode steps in a round.
        rounds: how often each batch is run; one round more, before, is thrown away.
        threads: of one product; None leaves torch's setting.

    Raises:
        RequestError: a number is below 1, or the tokens do not fit the model's context.
    """
    if min(*batches, tokens, rounds) < 1:
        raise RequestError("batches, tokens and rounds must be whole numbers of at least 1.")
    recorder = Recorder()
    with torch_threads(threads):
        plain, recording = (
            Engine(EngineConfig(model=model, max_running=max(batches)), sink=sink)
            for sink in (NullSink(), recorder)
        )
        rows = [_measure(plain, recording, recorder, batch, tokens, rounds) for batch in batches]
        words = f"--batches {','.join(map(str, batches))} --tokens {tokens} --rounds {rounds}"
        words += f" --threads {threads}" if threads else ""
        return report(rows, f"workbench bench recorder --model {model.name} {words} --json")


def _measure(
    plain: Engine, recording: Engine, recorder: Recorder, batch: int, tokens: int, rounds: int
) -> dict[str, Any]:
    pairs: list[Pair] = []
    for number in range(rounds + 1):
        recorder.clear()
        timed = _round(plain, recording, batch, tokens)
        expected = batch * (PROMPT_TOKENS + tokens - 1)
        assert recorder.num_rows == expected, f"{recorder.num_rows} rows, not {expected}"
        assert recorder.dropped.steps == 0, "the recorder dropped steps"
        if number:  # the first round warms up
            pairs += timed[1:]  # and the first step prefills
    return {
        "batch": batch,
        "step_ms_without": round(statistics.median(plain.wall for plain, _ in pairs), 4),
        "step_ms_with": round(statistics.median(both.wall for _, both in pairs), 4),
        "overhead": _overhead([(plain.wall, both.wall) for plain, both in pairs]),
        "overhead_cpu": _overhead([(plain.cpu, both.cpu) for plain, both in pairs]),
        "overhead_formula": "median over step pairs of with / without, minus 1",
        "pairs": len(pairs),
        "rows_recorded": recorder.num_rows,
        "rows_expected": expected,
        "bytes_per_row": round(recorder.num_bytes / recorder.num_rows),
    }


def _overhead(pairs: list[tuple[float, float]]) -> float:
    return round(statistics.median(with_it / without for without, with_it in pairs) - 1, 4)


def _round(plain: Engine, recording: Engine, batch: int, tokens: int) -> list[Pair]:
    """Return the milliseconds (without, with) of each pair of steps."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    for engine in (plain, recording):
        for number in range(batch):
            engine.add(_prompt(engine, number), params)
    pairs: list[Pair] = []
    gc.collect()
    while plain.has_work:
        if len(pairs) % 2:
            with_it, without = _timed(recording), _timed(plain)
        else:
            without, with_it = _timed(plain), _timed(recording)
        pairs.append((without, with_it))
    assert not recording.has_work, "the two engines ran different numbers of steps"
    return pairs


def _prompt(engine: Engine, number: int) -> list[int]:
    """Return token ids that differ from sequence to sequence, so that experts spread."""
    vocab = engine.model_config.vocab_size
    return [(number * 131 + place * 17) % vocab for place in range(1, PROMPT_TOKENS + 1)]


def _timed(engine: Engine) -> Milliseconds:
    wall, cpu = time.perf_counter(), time.process_time()
    engine.step()
    return Milliseconds((time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3)
