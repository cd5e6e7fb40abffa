"""What an engine starts with: its limits, its tables, and who runs its steps."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.checkpoint.manifest import fingerprint
from engine.cluster.devices import device_of
from engine.cluster.rank import Rank
from engine.cluster.weights import load_model
from engine.config import EngineConfig, ModelConfig
from engine.errors import CheckpointError, ConfigError
from engine.faults import Faults
from engine.kernels.registry import Ops
from engine.model.tokenizer import Tokenizer
from engine.routing.placement import contiguous
from engine.routing.policy import RoutingPolicy
from engine.routing.precision import FILE, Precision, PrecisionRouter, Thresholds, classes_of
from engine.routing.survivors import Roles
from engine.routing.table import RoutingTable


def routing(model: ModelConfig, config: EngineConfig) -> tuple[RoutingTable, RoutingPolicy]:
    """Return the table and the policy an engine starts with; a dense model's have no layers.

    Raises:
        ConfigError: formats are to be chosen by unit, but there are no thresholds for this model.
    """
    num_layers = len(model.moe_layers)
    num_experts = max(1, model.num_experts)
    policy = RoutingPolicy(
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=model.top_k,
        precision=_precision(model, config),
    )
    if config.capacity_factor is not None:
        if not model.is_moe:
            raise ConfigError(
                f"capacity_factor ({config.capacity_factor}) must be left out for {config.model}, "
                "which has no experts."
            )
        policy = policy.limited(config.capacity_factor)
    holders = Roles(config.attention_ranks).holders(range(config.num_devices))
    return contiguous(num_layers, num_experts, config.num_devices, holders=holders), policy


def _precision(model: ModelConfig, config: EngineConfig) -> Precision:
    """Return the number formats of the experts at the start; thresholds lie beside the model."""
    if config.precision != "auto":
        return Precision()
    path = Path(config.model) / FILE if config.precision_file is None else config.precision_file
    thresholds = Thresholds.load(
        path, weights_sha256=fingerprint(config.model), num_layers=len(model.moe_layers)
    )
    return Precision("auto", thresholds)


def own_rank(
    config: EngineConfig,
    model: ModelConfig,
    ops: Ops,
    tokenizer: Tokenizer,
    faults: Faults,
    num_positions: int,
) -> Rank:
    """Load the whole model into this process.

    Args:
        config: of the engine.
        model: its shape.
        ops: what it computes with.
        tokenizer: of the model; says of what class each token is, for formats chosen by unit.
        faults: of the engine.
        num_positions: longest text of the engine.

    Raises:
        CheckpointError: the folder is damaged or does not fit its config.
        MachineError: the KV cache asks for more memory than there is.
    """
    dtype, device = getattr(torch, config.dtype), device_of(config, 0)
    transformer = load_model(
        config.model, model, ops, faults, num_positions, dtype=dtype, device=device
    )
    rank = Rank(transformer.eval(), model, config, faults)
    if config.precision == "auto":
        rank.precision = precision_router(tokenizer, model.vocab_size, faults)
        rank.precision.ahead = config.predict_ahead
    return rank


def precision_router(tokenizer: Tokenizer, vocab_size: int, faults: Faults) -> PrecisionRouter:
    """Make what chooses formats by unit, from the texts of a model's vocabulary."""
    texts = map(tokenizer.token_bytes, range(vocab_size))
    return PrecisionRouter(classes_of(texts), faults)


def max_model_len(config: EngineConfig, trained: int) -> int:
    """Return the longest text, in tokens.

    Raises:
        ConfigError: the config asks for more than the model was trained for.
    """
    if config.max_model_len is None:
        return trained
    if config.max_model_len > trained:
        raise ConfigError(
            f"max_model_len ({config.max_model_len}) must be at most {trained}, the longest text "
            "the model was trained for."
        )
    return config.max_model_len


def tokenizer_of(config: EngineConfig, model: ModelConfig) -> Tokenizer:
    """Return the model's tokenizer.

    Raises:
        CheckpointError: it has more ids than the model.
    """
    tokenizer = Tokenizer(config.model)
    if tokenizer.vocab_size > model.vocab_size:
        raise CheckpointError(
            f"{config.model}: the tokenizer has ids up to {tokenizer.vocab_size - 1}, but "
            f"config.json says vocab_size {model.vocab_size}; they belong to two models."
        )
    return tokenizer
