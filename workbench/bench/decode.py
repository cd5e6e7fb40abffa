"""Tokens per second against transformers' `generate`, same weights, same prompts, one run.

Greedy, prompts of equal length (no padding on either side), a fixed number of new tokens, the same
number of threads. The two take turns, round by round. Prompts come from the samples of each domain,
so that routing is what real text causes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from engine import Engine, EngineConfig, SamplingParams
from engine.errors import MachineError, RequestError
from workbench.bench.machine import report, torch_threads
from workbench.prompts import SAMPLES

PROMPT_TOKENS = 12

Generate = Callable[[list[list[int]]], list[list[int]]]


def run(
    model: Path,
    *,
    batches: tuple[int, ...] = (1, 8, 32),
    dtypes: tuple[str, ...] = ("float32",),
    tokens: int = 64,
    rounds: int = 3,
    threads: int | None = None,
    against: bool = True,
) -> dict[str, Any]:
    """Measure one row per number format and batch size.

    Args:
        model: folder.
        batches: numbers of sequences run together.
        dtypes: `float32`, `bfloat16`.
        tokens: new tokens for each sequence.
        rounds: how often each is run; one round more, before, is thrown away.
        threads: of one product, on both sides; None leaves torch's setting.
        against: whether transformers runs too.

    Raises:
        MachineError: transformers is asked for and not installed.
        RequestError: a number is below 1.
    """
    if min(*batches, tokens, rounds) < 1:
        raise RequestError("batches, tokens and rounds must be whole numbers of at least 1.")
    if against and find_spec("transformers") is None:
        raise MachineError(
            "transformers is not installed; install the extra 'hf', or pass --no-transformers."
        )
    rows = []
    with torch_threads(threads):
        for dtype in dtypes:
            engine = Engine(EngineConfig(model=model, dtype=dtype, max_running=max(batches)))
            ours = _engine_generate(engine, tokens)
            theirs = _transformers_generate(model, dtype, tokens) if against else None
            for batch in batches:
                prompts = prompts_of(engine, batch)
                row = {"dtype": dtype, "batch": batch, "new_tokens": tokens}
                rows.append(row | _compare(ours, theirs, prompts, rounds))
        words = f"--batches {','.join(map(str, batches))} --dtypes {','.join(dtypes)}"
        words += f" --tokens {tokens} --rounds {rounds}"
        words += f" --threads {threads}" if threads else ""
        words += "" if against else " --no-transformers"
        return report(rows, f"workbench bench decode --model {model.name} {words} --json")


def _compare(
    ours: Generate, theirs: Generate | None, prompts: list[list[int]], rounds: int
) -> dict[str, Any]:
    contenders = {"ours": ours} | ({"transformers": theirs} if theirs else {})
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in contenders}
    outputs: dict[str, list[list[int]]] = {}
    for number in range(rounds + 1):
        for name, generate in contenders.items():
            began, cpu = time.perf_counter(), time.process_time()
            outputs[name] = generate(prompts)
            if number:  # the first round warms up
                seconds[name].append(time.perf_counter() - began)
                cpu_seconds[name].append(time.process_time() - cpu)
    made = sum(len(tokens) for tokens in outputs["ours"])
    speed = {name: made / statistics.median(times) for name, times in seconds.items()}
    row: dict[str, Any] = {"tokens_per_second": round(speed["ours"], 1)}
    if theirs is None:
        return row
    equal = sum(a == b for a, b in zip(outputs["ours"], outputs["transformers"], strict=True))
    return row | {
        "transformers_tokens_per_second": round(speed["transformers"], 1),
        "ratio": _ratio(seconds),
        "ratio_cpu": _ratio(cpu_seconds),
        "ratio_formula": "median over rounds of transformers' seconds / ours",
        "same_text": f"{equal} of {len(prompts)}",
    }


def _ratio(seconds: dict[str, list[float]]) -> float:
    """Return how many times longer transformers took, or with processor time, worked."""
    paired = zip(seconds["ours"], seconds["transformers"], strict=True)
    return round(statistics.median(theirs / ours for ours, theirs in paired), 2)


def _engine_generate(engine: Engine, tokens: int) -> Generate:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        return [list(done.token_ids) for done in engine.generate(prompts, params)]

    return generate


def _transformers_generate(model: Path, dtype: str, tokens: int) -> Generate:
    transformers: Any = import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    load = transformers.AutoModelForCausalLM.from_pretrained
    reference = load(model, dtype=getattr(torch, dtype)).eval()
    greedy = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=tokens, eos_token_id=None, pad_token_id=0, use_cache=True
    )
    # The model's own settings would come back for every None; an eos among them ends text early.
    reference.generation_config = greedy

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        ids_BT = torch.tensor(prompts)
        with torch.inference_mode():
            made_BT = reference.generate(ids_BT, attention_mask=torch.ones_like(ids_BT))
        return [row[ids_BT.shape[1] :].tolist() for row in made_BT]

    return generate


def prompts_of(engine: Engine, batch: int) -> list[list[int]]:
    """Return `batch` prompts of `PROMPT_TOKENS` tokens, from all domains, no two alike."""
    texts = [engine.tokenizer.encode(text) for _, text in SAMPLES]
    prompts = []
    for number in range(batch):
        text = texts[number % len(texts)]
        shift = number // len(texts) % max(1, len(text) - PROMPT_TOKENS)
        prompts.append([text[0], *text[1 + shift : PROMPT_TOKENS + shift]])
    return prompts
