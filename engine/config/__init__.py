"""What can be set: the model's shape, the engine's limits, one request's sampling.

All three are frozen and checked when made; a wrong value is a `ConfigError` that names the option,
the value and what is allowed. Nothing is read from the environment.
"""

from __future__ import annotations

from engine.config.checks import at_least, from_mapping, one_of, within
from engine.config.engine import (
    DEVICES,
    DTYPES,
    EXCHANGES,
    MAX_DEVICES,
    MAX_RANKS,
    MAX_THREADS,
    PRECISIONS,
    EngineConfig,
)
from engine.config.hf import MAX_EXPERTS
from engine.config.model import FAMILIES, ModelConfig
from engine.config.sampling import MAX_SEED, SamplingParams

__all__ = [
    "DEVICES",
    "DTYPES",
    "EXCHANGES",
    "FAMILIES",
    "MAX_DEVICES",
    "MAX_EXPERTS",
    "MAX_RANKS",
    "MAX_SEED",
    "MAX_THREADS",
    "PRECISIONS",
    "EngineConfig",
    "ModelConfig",
    "SamplingParams",
    "at_least",
    "from_mapping",
    "one_of",
    "within",
]
