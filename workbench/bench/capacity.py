"""What a capacity factor drops, and what that does to balance and output.

The same held-out texts run as prompts, one at a time, under each factor; the first row drops
nothing. No times are taken.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from engine import Engine, EngineConfig, SamplingParams
from engine.config.checks import within
from engine.errors import MachineError
from engine.events import Event, StepEvent
from workbench.bench.machine import report
from workbench.bench.smoothing import MOST, held_out, log_probabilities

FORMULAS = {
    "dropped_share": "pairs of token and expert that found no room / pairs, all layers",
    "balance": "max / mean of the rows that experts ran, mean over layers and texts; 1 is even",
    "bits_per_byte": "-log2 of the probability of held-out text / its bytes, all domains together",
    "kl_nats": "sum p ln(p / q), p with nothing dropped, mean over the texts' tokens",
}


def run(
    model: Path, *, factors: tuple[float, ...] = (2.0, 1.5, 1.2, 1.0), texts: int = 2
) -> dict[str, Any]:
    """Measure one row per factor, after one without.

    Args:
        model: folder.
        factors: of capacity.
        texts: held-out texts of each domain.

    Raises:
        ConfigError: `texts` is out of range.
        RoutingError: a factor is out of range.
        MachineError: the model has no experts.
    """
    within("texts", texts, 1, MOST)
    heard = _Counts()
    with closing(Engine(EngineConfig(model=model), sink=heard)) as engine:
        if not engine.model_config.is_moe:
            raise MachineError(f"{model} has no experts, so nothing can be dropped.")
        read = held_out(engine, texts)
        rows: list[dict[str, Any]] = []
        plain: list[np.ndarray] = []
        for factor in (None, *factors):
            engine.control.set_capacity(factor)
            heard.begin(engine.model_config.num_experts)
            for ids, _ in read:
                engine.generate([ids], SamplingParams(max_tokens=0))
            found = [log_probabilities(engine, ids) for ids, _ in read]
            plain = plain or found
            rows.append({"factor": factor} | heard.figures() | _output(read, found, plain))
    words = f"--factors {','.join(f'{f:g}' for f in factors)} --texts {texts}"
    command = f"workbench experiment capacity --model {model.name} {words} --json"
    return report(rows, command) | {"formulas": FORMULAS}


def _output(
    read: list[tuple[list[int], int]], found: list[np.ndarray], plain: list[np.ndarray]
) -> dict[str, float]:
    bits = kl = 0.0
    for (ids, _), mine_TV, theirs_TV in zip(read, found, plain, strict=True):
        bits -= float(mine_TV[np.arange(len(ids) - 1), ids[1:]].sum()) / np.log(2)
        kl += float((np.exp(theirs_TV) * (theirs_TV - mine_TV)).sum())
    return {
        "bits_per_byte": round(bits / sum(size for _, size in read), 4),
        "kl_nats": round(kl / sum(map(len, found)), 5),
    }


class _Counts:
    """A sink that counts slots asked for, dropped, and run by expert."""

    enabled = True

    def begin(self, num_experts: int) -> None:
        """Start anew."""
        self._experts, self._asked, self._dropped = num_experts, 0, 0
        self._balance: list[float] = []

    def emit(self, event: Event) -> None:
        """Count one step."""
        if not isinstance(event, StepEvent):
            return
        self._asked += event.topk_ids.size
        self._dropped += sum(event.dropped)
        for layer in range(event.topk_ids.shape[1]):
            ran = event.topk_ids[:, layer][event.phy_ids[:, layer] >= 0]
            counts_E = np.bincount(ran, minlength=self._experts)
            self._balance.append(float(counts_E.max() / counts_E.mean()))

    def figures(self) -> dict[str, float]:
        """Return what was counted."""
        return {
            "dropped_share": round(self._dropped / self._asked, 4),
            "balance": round(float(np.mean(self._balance)), 4),
        }
