"""What smoothing does: jumps, traffic, balance, output and speed, reported together.

The same prompts are continued greedily and the same held-out texts are read at each strength; 0 is
without smoothing. Speed is taken in turns, without a listener. Where smoothing changes what is
written, jumps and traffic are those of the other text, as they would be in service.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine import Engine, EngineConfig, SamplingParams
from engine.config.checks import at_least, within
from engine.errors import MachineError
from engine.events import Event, Int64, StepEvent
from engine.exchange.dispatch import traffic
from engine.train.data import DOMAINS, documents
from workbench.bench.machine import report, torch_threads
from workbench.traffic import corpus_prompts

DEVICES = 4
MOST = 1024
"""Requests, texts and rounds; more would take hours and all memory."""
TEXT_CHARACTERS = 300
FORMULAS = {
    "jump_rate": "pairs of neighbouring tokens of a sequence with other sets of experts / pairs, "
    "mean over layers",
    "pattern_stability": "1 - sum |m - m'| / sum (m + m') over the entries of the traffic matrices "
    "(source x destination device, by layer) of one step and the next with as many rows; mean; 1 "
    "is the same traffic",
    "balance": "max / mean of the rows by expert, mean over layers; 1 is even",
    "bits_per_byte": "-log2 of the probability of held-out text / its bytes, all domains together",
    "kl_nats": "sum p ln(p / q), p without smoothing and q with it, mean over the texts' tokens",
    "same_text": "prompts continued by the same tokens as without smoothing",
    "decode_tokens_per_s": "new tokens / seconds of the steps that write them",
    "prompt_tokens_per_s": "tokens of the texts / seconds of running them as prompts",
}


def run(
    model: Path,
    *,
    strengths: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0),
    window: int = 1,
    decay: float = 1.0,
    requests: int = 16,
    tokens: int = 32,
    texts: int = 2,
    rounds: int = 3,
    threads: int | None = 1,
) -> dict[str, Any]:
    """Measure one row per strength, 0 first.

    Args:
        model: folder.
        strengths: bonuses on a logit.
        window: tokens an expert is remembered.
        decay: factor on the bonus for every further token.
        requests: prompts that run together.
        tokens: new tokens of each.
        texts: held-out texts of each domain that are read.
        rounds: repetitions of the speeds; medians are shown.
        threads: of one product; None leaves torch's setting.

    Raises:
        ConfigError: a number is out of range.
        RoutingError: a strength, the window or the decay is out of range.
        MachineError: the model has no experts.
    """
    for name, value in (("requests", requests), ("texts", texts), ("rounds", rounds)):
        within(name, value, 1, MOST)
    at_least("tokens", tokens, 1)
    choices, levels = _Choices(), (0.0, *(s for s in strengths if s))
    with torch_threads(threads):
        config = EngineConfig(model=model, num_devices=DEVICES, max_running=requests)
        with closing(Engine(config, sink=choices)) as engine:
            if not engine.model_config.is_moe:
                raise MachineError(f"{model} has no experts, so there is nothing to smooth.")
            read = held_out(engine, texts)
            prompts = [p.text for p in corpus_prompts()[:requests]]
            rows: list[dict[str, Any]] = []
            plain: _Pass | None = None
            for strength in levels:
                engine.control.set_smoothing(strength, window, decay)
                one = _pass(engine, choices, prompts, tokens, read)
                plain = plain or one
                rows.append({"strength": strength, "window": window, "decay": decay})
                rows[-1] |= one.figures(engine, plain)
            for row, speeds in zip(
                rows, _speeds(engine, levels, window, decay, prompts, tokens, read, rounds),
                strict=True,
            ):  # fmt: skip
                row |= speeds
        words = f"--strengths {','.join(f'{s:g}' for s in strengths)} --window {window}"
        words += f" --decay {decay:g} --requests {requests} --tokens {tokens} --texts {texts}"
        command = f"workbench experiment smoothing --model {model.name} {words} --json"
        return report(rows, command) | {"formulas": FORMULAS}


class _Choices:
    """A sink that keeps steps while it is asked to."""

    def __init__(self) -> None:
        self.enabled = False
        self.steps: list[StepEvent] = []

    def emit(self, event: Event) -> None:
        """Keep a step."""
        if isinstance(event, StepEvent):
            self.steps.append(event)


class _Pass:
    """What one strength did: to the choices of continuations, and to texts."""

    def __init__(
        self, steps: list[StepEvent], written: list[tuple[int, ...]], read: list[npt.NDArray[Any]]
    ) -> None:
        self.steps, self.written, self.read = steps, written, read
        self.texts: Sequence[tuple[list[int], int]] = ()

    def figures(self, engine: Engine, plain: _Pass) -> dict[str, Any]:
        """Return everything but the speed."""
        bits = kl = 0.0
        count = num_bytes = 0
        for (ids, size), mine_TV, theirs_TV in zip(self.texts, self.read, plain.read, strict=True):
            own_T = np.arange(len(ids) - 1)
            bits -= float(mine_TV[own_T, ids[1:]].sum()) / np.log(2)
            kl += float((np.exp(theirs_TV) * (theirs_TV - mine_TV)).sum())
            count, num_bytes = count + len(mine_TV), num_bytes + size
        pairs = zip(self.written, plain.written, strict=True)
        return {
            "jump_rate": round(jump_rate(self.steps), 4),
            "pattern_stability": round(stability(self.steps, engine), 4),
            "balance": round(balance(self.steps, engine.model_config.num_experts), 4),
            "bits_per_byte": round(bits / num_bytes, 4),
            "kl_nats": round(kl / count, 5),
            "same_text": f"{sum(a == b for a, b in pairs)} of {len(self.written)}",
        }


def held_out(engine: Engine, count: int) -> list[tuple[list[int], int]]:
    """Return token ids and bytes of held-out texts, `count` of each domain."""
    found = []
    for domain in DOMAINS:
        for document, _ in zip(documents(domain, "heldout"), range(count), strict=False):
            text = document.text[:TEXT_CHARACTERS]
            found.append((engine.tokenizer.encode(text), len(text.encode())))
    return found


def _pass(
    engine: Engine,
    choices: _Choices,
    prompts: list[str],
    tokens: int,
    texts: list[tuple[list[int], int]],
) -> _Pass:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    choices.steps, choices.enabled = [], True
    written = [done.token_ids for done in engine.generate(prompts, params)]
    choices.enabled = False
    read = []
    for ids, _ in texts:
        read.append(log_probabilities(engine, ids))
    found = _Pass(choices.steps, written, read)
    found.texts = texts
    return found


def log_probabilities(engine: Engine, ids: list[int]) -> npt.NDArray[np.float64]:
    """Return (T, V) natural logarithms of what the model says comes after each token."""
    logits_TV = engine.logits(ids).astype(np.float64)
    logits_TV -= logits_TV.max(axis=1, keepdims=True)
    found: npt.NDArray[np.float64] = logits_TV - np.log(
        np.exp(logits_TV).sum(axis=1, keepdims=True)
    )
    return found


def _speeds(
    engine: Engine,
    levels: tuple[float, ...],
    window: int,
    decay: float,
    prompts: list[str],
    tokens: int,
    texts: list[tuple[list[int], int]],
    rounds: int,
) -> list[dict[str, Any]]:
    """Return tokens per second of each strength, which take turns."""
    decode: dict[float, list[float]] = {level: [] for level in levels}
    prefill: dict[float, list[float]] = {level: [] for level in levels}
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    for _ in range(rounds):
        for level in levels:
            engine.control.set_smoothing(level, window, decay)
            for prompt in prompts:
                engine.add(prompt, params)
            engine.step()
            while engine.stats().num_waiting:
                engine.step()
            began, made = time.perf_counter(), 0
            while engine.has_work:
                made += sum(len(output.token_ids) for output in engine.step())
            decode[level].append(made / (time.perf_counter() - began))
            began = time.perf_counter()
            engine.generate([ids for ids, _ in texts], SamplingParams(max_tokens=0))
            seconds = time.perf_counter() - began
            prefill[level].append(sum(len(ids) for ids, _ in texts) / seconds)
    return [
        {
            "decode_tokens_per_s": round(statistics.median(decode[level]), 1),
            "prompt_tokens_per_s": round(statistics.median(prefill[level]), 1),
        }
        for level in levels
    ]


def jump_rate(steps: Sequence[StepEvent]) -> float:
    """Return `FORMULAS["jump_rate"]`.

    Experts {0, 1}, {1, 0}, {1, 2} of one sequence in one layer: one jump in two pairs, 0.5.
    """
    requests = np.concatenate([step.request_ids for step in steps])
    positions = np.concatenate([step.positions for step in steps]).astype(np.int64)
    ids_TLK = np.sort(np.concatenate([step.topk_ids for step in steps]), axis=-1)
    order = np.lexsort((positions, requests))
    requests, positions, ids_TLK = requests[order], positions[order], ids_TLK[order]
    pairs = (requests[1:] == requests[:-1]) & (np.diff(positions) == 1)
    jumps_TL = (ids_TLK[1:] != ids_TLK[:-1]).any(axis=-1)
    return float(jumps_TL[pairs].mean()) if pairs.any() else float("nan")


def stability(steps: Sequence[StepEvent], engine: Engine) -> float:
    """Return `FORMULAS["pattern_stability"]`."""
    table, alike = engine.table, []
    before: tuple[int, list[Int64]] = (0, [])
    for step in steps:
        layers = step.phy_ids.shape[1]
        now = [
            traffic(step.homes.astype(np.int64), step.phy_ids[:, layer].astype(np.int64), table)
            for layer in range(layers)
        ]
        if before[0] == step.num_rows:
            alike += [_alike(one, other) for one, other in zip(before[1], now, strict=True)]
        before = (step.num_rows, now)
    return float(np.mean(alike)) if alike else float("nan")


def _alike(one: Int64, other: Int64) -> float:
    """Say how alike two traffic matrices are: [[2, 0]] and [[1, 1]] are to a half."""
    return 1.0 - float(np.abs(one - other).sum() / (one + other).sum())


def balance(steps: Sequence[StepEvent], num_experts: int) -> float:
    """Return `FORMULAS["balance"]`: counts [6, 2, 0, 0] of one layer give 3."""
    ids_TLK = np.concatenate([step.topk_ids for step in steps]).astype(np.int64)
    counts = [
        np.bincount(ids_TLK[:, layer].ravel(), minlength=num_experts)
        for layer in range(ids_TLK.shape[1])
    ]
    return float(np.mean([count.max() / count.mean() for count in counts]))
