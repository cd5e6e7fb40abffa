"""The training loop: fixed steps and a seed, progress, held-out checks, checkpoints that resume.

A run is a function of its settings: batches are drawn from (seed, step), the schedule knows the
number of steps beforehand, and nothing looks at a clock except the progress line. A checkpoint
holds parameters, optimiser state and step; a resumed run equals an uninterrupted one.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.train.batches import Stream, training_batch
from engine.train.evaluate import bits_by_domain
from engine.train.losses import distillation_loss, next_token_loss, router_loss
from engine.train.network import MODELS, Network
from engine.train.optim import Optimiser, decay_start, rate_scale

Say = Callable[[str], None]
HISTORY = "history.jsonl"
"""One line per held-out check; the report shows it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Everything a run depends on; a checkpoint of other settings is refused."""

    model: str = "moe"
    """`moe` or `draft`."""
    num_steps: int
    seed: int = 0
    step_tokens: int = 8192
    """Tokens of one step, whatever the context."""
    context: int = 256
    long_context: int = 512
    """Context of the last tenth of the steps, so that positions up to here are trained."""
    long_share: float = 0.1
    matrix_rate: float = 0.02
    rate: float = 2e-3
    warm_up_steps: int = 120
    bf16: bool = True
    """Products in bf16; parameters and optimiser stay fp32."""

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ConfigError(f"model ({self.model!r}) is unknown; use one of {sorted(MODELS)}.")
        if self.num_steps < 1:
            raise ConfigError(f"num_steps ({self.num_steps}) must be at least 1.")
        longest = max(self.context, self.long_context)
        if self.step_tokens < longest:
            raise ConfigError(
                f"step_tokens ({self.step_tokens}) must be at least {longest}, one context."
            )

    def context_at(self, step: int) -> int:
        """Return the context length of one step."""
        return self.long_context if step >= self.num_steps * (1 - self.long_share) else self.context


class Trainer:
    """One run: owns network and optimiser, steps, saves, restores."""

    def __init__(
        self,
        config: TrainConfig,
        streams: Mapping[str, Stream],
        *,
        teacher: Network | None = None,
        compiled: bool = False,
    ) -> None:
        self.config = config
        self.streams = streams
        self.network = Network(MODELS[config.model], config.seed)
        self.optimiser = Optimiser(self.network, matrix_rate=config.matrix_rate, rate=config.rate)
        self.teacher = teacher
        self.num_done = 0
        self._loss = torch.compile(self._loss_of, dynamic=False) if compiled else self._loss_of

    def step(self) -> float:
        """Train on one batch and return its cross-entropy in nats per token."""
        config = self.config
        context = config.context_at(self.num_done)
        windows = training_batch(
            self.streams, self.num_done, config.seed, config.step_tokens // context, context
        )
        loss, reported = self._loss(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())
        torch.autograd.backward(loss)
        self.optimiser.step(rate_scale(self.num_done, config.num_steps, config.warm_up_steps))
        self.num_done += 1
        return float(reported.detach())

    def save(self, folder: Path) -> None:
        """Write checkpoint.pt, replacing the last one only when the new one is whole."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "settings": asdict(self.config),
            "step": self.num_done,
            "network": self.network.state_dict(),
            "optimiser": self.optimiser.state_dict(),
        }
        partial = folder / "checkpoint.partial"
        torch.save(state, partial)
        os.replace(partial, folder / "checkpoint.pt")

    def restore(self, folder: Path) -> bool:
        """Continue from a folder's checkpoint; return False when it has none.

        The number of steps may change until the decay begins: so far it made no difference.
        Raises: ConfigError when the checkpoint was made with other settings.
        """
        path = folder / "checkpoint.pt"
        if not path.is_file():
            return False
        saved = torch.load(path, weights_only=True)
        old = saved["settings"]
        if saved["step"] <= decay_start(min(old["num_steps"], self.config.num_steps)):
            old["num_steps"] = self.config.num_steps
        for name, value in asdict(self.config).items():
            if old.get(name) != value:
                raise ConfigError(
                    f"{name} ({value}) differs from the checkpoint's ({old.get(name)}) in"
                    f" {folder}; use that value or another run folder."
                )
        self.network.load_state_dict(saved["network"])
        self.optimiser.load_state_dict(saved["optimiser"])
        self.num_done = saved["step"]
        return True

    def _loss_of(self, ids_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        dtype = torch.bfloat16 if self.config.bf16 else torch.float32
        logits, routings = self.network(ids_BT, dtype)
        if self.teacher is None:
            prediction = next_token_loss(logits, targets_BT)
        else:
            with torch.no_grad():
                taught, _ = self.teacher(ids_BT, dtype)
            prediction = distillation_loss(logits, taught)
        return prediction + router_loss(routings), prediction


@dataclass(frozen=True, kw_only=True, slots=True)
class Reporting:
    """How often a run speaks, checks and saves, in steps."""

    progress_every: int = 20
    check_every: int = 250
    save_every: int = 100
    check_windows: int = 16


def train(
    trainer: Trainer,
    folder: Path,
    heldout: Mapping[str, Stream],
    bytes_V: Tensor,
    reporting: Reporting,
    say: Say,
) -> None:
    """Run the remaining steps; write `checkpoint.pt` and `history.jsonl` in `folder`."""
    config = trainer.config
    _forget_after(folder / HISTORY, trainer.num_done)
    started, first = time.perf_counter(), trainer.num_done
    average: float | None = None
    while trainer.num_done < config.num_steps:
        loss = trainer.step()
        average = loss if average is None else 0.97 * average + 0.03 * loss
        done, last = trainer.num_done, trainer.num_done == config.num_steps
        if done % reporting.progress_every == 0 or last:
            speed = (done - first) * config.step_tokens / (time.perf_counter() - started)
            left_min = (config.num_steps - done) * config.step_tokens / speed / 60
            say(
                f"step {done}/{config.num_steps}  loss {average:.3f}  {speed:,.0f} tokens/s"
                f"  {left_min:.0f} min left"
            )
        if done % reporting.save_every == 0 or last:
            trainer.save(folder)
        if done % reporting.check_every == 0 or last:
            bits = bits_by_domain(
                trainer.network,
                heldout,
                bytes_V,
                num_windows=reporting.check_windows,
                context=config.context,
            )
            entry = {
                "step": done,
                "tokens": done * config.step_tokens,
                "loss": round(average, 4),
                "bits_per_byte": {name: round(value, 4) for name, value in bits.items()},
            }
            _append(folder / HISTORY, entry)
            say(f"held-out bits per byte: {entry['bits_per_byte']}")


def _forget_after(path: Path, step: int) -> None:
    """Drop the checks of steps that a resumed run will take again."""
    if path.is_file():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        path.write_text("".join(kept), encoding="utf-8")


def _append(path: Path, entry: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")
