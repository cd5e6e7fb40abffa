"""Open the draft of an engine, or say in one sentence why it does not fit."""

from __future__ import annotations

from pathlib import Path

from engine.checkpoint.load import check_fit, read_config
from engine.config import EngineConfig, ModelConfig
from engine.errors import ConfigError
from engine.faults import Faults
from engine.model.kv_cache import KVCache
from engine.model.tokenizer import Tokenizer
from engine.routing.speculation import Speculation
from engine.runtime.draft.drafter import Drafter
from engine.runtime.draft.network import DraftNetwork
from engine.runtime.scheduler import Scheduler

FAMILY = "qwen3"


def check_draft(config: EngineConfig, target: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """Hold `config.draft` against a target before any weight of either is read.

    Args:
        config: of the engine.
        target: the target's shape.
        tokenizer: the target's.

    Returns:
        the draft's shape.

    Raises:
        ConfigError: it is no dense model in the Qwen3 layout, or has another vocabulary.
        CheckpointError: its folder is missing or damaged.
    """
    assert config.draft is not None, "the engine has no draft"
    folder = Path(config.draft)
    draft = read_config(folder)
    if draft.family != FAMILY:
        raise ConfigError(
            f"draft ({folder}) is of family {draft.family}; a draft must be a dense model of "
            f"family {FAMILY}, such as data/models/polyglot-draft."
        )
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"draft ({folder}) has vocab_size {draft.vocab_size}, the model {config.model} has "
            f"{target.vocab_size}; both must have one vocabulary."
        )
    if not Tokenizer(folder).same_tokens(tokenizer):
        raise ConfigError(
            f"draft ({folder}) has another tokenizer than the model {config.model}; a token id "
            "must stand for the same text in both."
        )
    check_fit(folder, draft)
    return draft


def open_drafter(
    config: EngineConfig,
    draft: ModelConfig,
    scheduler: Scheduler,
    cache: KVCache,
    faults: Faults,
    num_positions: int,
) -> Drafter:
    """Load the weights of `config.draft` and let it propose to an engine.

    Args:
        config: of the engine.
        draft: the draft's shape, as `check_draft` returned it.
        scheduler: of the engine.
        cache: the target's.
        faults: of the engine.
        num_positions: longest text of the engine; the draft falls silent at its own limit.

    Raises:
        CheckpointError: its files are damaged.
    """
    assert config.draft is not None, "the engine has no draft"
    longest = min(num_positions, draft.max_position_embeddings)
    network = DraftNetwork(Path(config.draft), draft, longest)
    policy = Speculation(config.draft_tokens, adaptive=config.draft_length == "adaptive")
    policy.ahead = config.predict_ahead
    by_chance = config.draft_sampling == "rejection"
    return Drafter(network, policy, scheduler, cache, faults, by_chance=by_chance)
