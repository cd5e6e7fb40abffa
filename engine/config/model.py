"""The shape of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from engine.config.checks import at_least, number, one_of, within
from engine.config.hf import MAX_EXPERTS, boolean, ids, num_experts, refuse_unsupported, rope_theta
from engine.errors import ConfigError

FAMILIES = ("qwen3_moe", "qwen3")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only transformer, dense or Mixture-of-Experts."""

    family: str
    """`qwen3_moe` or `qwen3`."""
    vocab_size: int
    hidden_size: int
    """D, the model width."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """F of a dense feed-forward layer."""
    moe_intermediate_size: int = 0
    """F of one expert."""
    num_experts: int = 0
    """E; 0 for a dense model."""
    top_k: int = 0
    """K, experts per token."""
    norm_topk_prob: bool = True
    """Whether the K weights are renormalised to sum to 1."""
    routed_scaling_factor: float = 1.0
    """Factor on the K weights, applied once, after renormalising."""
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 256
    """The longest sequence, in tokens, the model was trained for."""
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    further_eos_token_ids: tuple[int, ...] = ()
    """More ids that end a text just as `eos_token_id` does, where a model has several."""
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        one_of("family", self.family, FAMILIES)
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads"):
            at_least(name, getattr(self, name), 1)
        at_least("max_position_embeddings", self.max_position_embeddings, 1)
        at_least("head_dim", self.head_dim, 2)
        if self.head_dim % 2:
            raise ConfigError(f"head_dim ({self.head_dim}) must be even, for rotary positions.")
        width = "moe_intermediate_size" if self.num_experts else "intermediate_size"
        at_least(width, getattr(self, width), 1)
        for name in ("routed_scaling_factor", "rms_norm_eps", "rope_theta"):
            if not 0 < number(name, getattr(self, name)) < math.inf:
                raise ConfigError(f"{name} ({getattr(self, name)}) must be a number above 0.")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads})."
            )
        within("num_experts", self.num_experts, 0, MAX_EXPERTS)
        if self.num_experts:
            within("top_k", self.top_k, 1, self.num_experts)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            token = getattr(self, name)
            if token is not None:
                within(name, token, 0, self.vocab_size - 1)
        for token in self.further_eos_token_ids:
            within("eos_token_id", token, 0, self.vocab_size - 1)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every id that ends a text."""
        first = () if self.eos_token_id is None else (self.eos_token_id,)
        return frozenset((*first, *self.further_eos_token_ids))

    @property
    def is_moe(self) -> bool:
        """Whether the feed-forward layers are Mixtures of Experts."""
        return self.num_experts > 0

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The numbers of the layers that route, in order: all of a MoE model's, none of others."""
        return tuple(range(self.num_layers)) if self.is_moe else ()

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        """Read the contents of a Hugging Face `config.json`.

        Raises:
            ConfigError: the family is not supported, a needed key is missing, or a feature is
                switched on that this engine does not compute.
        """
        if not isinstance(raw, Mapping):
            raise ConfigError(f"config.json must hold an object, not a {type(raw).__name__}.")
        eos = ids(raw.get("eos_token_id"))
        family = str(raw.get("model_type"))
        one_of("model_type", family, FAMILIES)
        refuse_unsupported(raw, family)
        try:
            heads, width = raw["num_attention_heads"], raw["hidden_size"]
            moe = (
                {}
                if family != "qwen3_moe"
                else {
                    "moe_intermediate_size": raw["moe_intermediate_size"],
                    "num_experts": num_experts(raw),
                    "top_k": raw["num_experts_per_tok"],
                    "norm_topk_prob": boolean(raw, "norm_topk_prob"),
                    "routed_scaling_factor": raw.get("routed_scaling_factor", 1.0),
                }
            )
            return cls(
                family=family,
                vocab_size=raw["vocab_size"],
                hidden_size=width,
                num_layers=raw["num_hidden_layers"],
                num_heads=heads,
                num_kv_heads=raw.get("num_key_value_heads", heads),
                head_dim=raw.get("head_dim") or width // heads,
                intermediate_size=raw["intermediate_size"],
                rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
                rope_theta=rope_theta(raw),
                tie_word_embeddings=boolean(raw, "tie_word_embeddings"),
                max_position_embeddings=raw.get("max_position_embeddings", 32768),
                bos_token_id=raw.get("bos_token_id"),
                eos_token_id=eos[0] if eos else None,
                further_eos_token_ids=tuple(eos[1:]),
                pad_token_id=raw.get("pad_token_id"),
                **moe,
            )
        except KeyError as missing:
            raise ConfigError(
                f"config.json lacks the key {missing}, which family {family!r} needs."
            ) from None
        except (TypeError, ValueError, ArithmeticError) as wrong:
            raise ConfigError(f"config.json has a value of the wrong type: {wrong}.") from None
