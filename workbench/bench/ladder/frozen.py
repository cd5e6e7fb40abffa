"""What the modelled ladder is computed from: a file written beforehand, and choices recorded now.

The file (`data/hardware/ladder/frozen.json`) fixes machine, widths, tokens of a step and seed. The
experts each token goes to are no assumption: the bundled model chooses them for excerpts of the
corpus's held-out texts, in this process, with as many logical devices as the machine has ranks.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from engine import Engine, EngineConfig, SamplingParams
from engine.config import at_least, from_mapping
from engine.errors import ConfigError
from engine.events import Event, StepEvent
from workbench import paths
from workbench.bench.ladder.rungs import Int
from workbench.traffic import corpus_prompts

TEXTS_PER_DOMAIN = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The routed layers whose times are modelled."""

    model: str
    experts: int
    top_k: int
    hidden: int
    """D"""
    expert_width: int
    """F"""
    moe_layers: int
    bytes_per_value: int

    def __post_init__(self) -> None:
        for name in ("experts", "top_k", "hidden", "expert_width", "moe_layers"):
            at_least(name, getattr(self, name), 1)
        at_least("bytes_per_value", self.bytes_per_value, 1)

    @property
    def expert_values(self) -> int:
        """Weights of one expert: gate, up and down."""
        return 3 * self.hidden * self.expert_width


@dataclass(frozen=True, kw_only=True, slots=True)
class Frozen:
    """The contents of the file."""

    topology: str
    """Name of a file in data/hardware."""
    shape: Shape
    tokens: int
    """Of one step, on all ranks together."""
    steps: int
    smoothing: float
    """Bonus of the last rung, in units of a logit."""
    seed: int
    sources: Mapping[str, str]
    """Why each is what it is."""

    def __post_init__(self) -> None:
        at_least("tokens", self.tokens, 1)
        at_least("steps", self.steps, 1)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file.

        Raises:
            ConfigError: an unknown or a missing key, or a value that is not allowed.
        """
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return from_mapping(cls, raw | {"shape": from_mapping(Shape, raw["shape"])})


@dataclass(frozen=True, slots=True)
class Recorded:
    """What T tokens of one step chose, in the L routed layers of the bundled model."""

    topk_ids_TLK: Int
    homes_T: Int
    request_ids_T: Int


def record(frozen: Frozen, ranks: int, *, smoothing: float = 0.0) -> list[Recorded]:
    """Return `steps` + 1 steps of exactly `tokens` prompt rows each; the first is for planning.

    Raises:
        ConfigError: the bundled model has another number of experts or of choices.
    """
    heard = _Choices()
    config = EngineConfig(
        model=paths.model_folder(paths.DEFAULT_MODEL),
        num_devices=ranks,
        max_running=frozen.tokens,
        max_step_tokens=frozen.tokens,
        num_blocks=frozen.tokens // 2 + 64,
    )
    with closing(Engine(config, sink=heard)) as engine:
        found = engine.model_config
        if (found.num_experts, found.top_k) != (frozen.shape.experts, frozen.shape.top_k):
            raise ConfigError(
                f"shape ({frozen.shape.experts} experts, top {frozen.shape.top_k}) must be the "
                f"bundled model's, {found.num_experts} and {found.top_k}, whose choices are used."
            )
        engine.control.set_smoothing(smoothing)
        _fill(engine, frozen)
        while len(heard.steps) <= frozen.steps:
            engine.step()
    return heard.steps


def _fill(engine: Engine, frozen: Frozen) -> None:
    """Queue prompts, none of which is to be continued, for all steps and a little more."""
    missing = frozen.tokens * (frozen.steps + 1)
    prompts = corpus_prompts(TEXTS_PER_DOMAIN, frozen.seed)
    for prompt in itertools.cycle(prompts):
        ids = engine.tokenizer.encode(prompt.text)
        engine.add(ids, SamplingParams(max_tokens=0), label=prompt.domain)
        missing -= len(ids)
        if missing <= 0:
            return


class _Choices:
    """A sink that keeps which experts were chosen."""

    enabled = True

    def __init__(self) -> None:
        self.steps: list[Recorded] = []

    def emit(self, event: Event) -> None:
        if isinstance(event, StepEvent):
            self.steps.append(
                Recorded(
                    event.topk_ids.astype(np.int64),
                    event.homes.astype(np.int64),
                    event.request_ids,
                )
            )
