"""What can be set: the model's shape, the engine's limits, one request's sampling.

All three are frozen and checked when made; a wrong value is a `ConfigError` that names the option,
the value and what is allowed. Nothing is read from the environment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self, TypeVar

from engine.errors import ConfigError, nearest

DTYPES = ("float32", "bfloat16")
EXPERT_FORMATS = ("model", "int8")
FAMILIES = ("qwen3_moe", "qwen3")
MAX_EXPERTS = 32767
"""Expert ids are 16-bit in every record."""
MAX_DEVICES = 1024
MAX_RANKS = 64
EXCHANGES = ("naive", "request", "grouped", "overlapped")
MAX_THREADS = 1024
MAX_SEED = 2**64 - 1

C = TypeVar("C")


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
            if not 0 < _number(name, getattr(self, name)) < math.inf:
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
        eos = _ids(raw.get("eos_token_id"))
        family = str(raw.get("model_type"))
        one_of("model_type", family, FAMILIES)
        _refuse_unsupported(raw, family)
        try:
            heads, width = raw["num_attention_heads"], raw["hidden_size"]
            moe = (
                {}
                if family != "qwen3_moe"
                else {
                    "moe_intermediate_size": raw["moe_intermediate_size"],
                    "num_experts": _num_experts(raw),
                    "top_k": raw["num_experts_per_tok"],
                    "norm_topk_prob": _bool(raw, "norm_topk_prob"),
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
                rope_theta=_rope_theta(raw),
                tie_word_embeddings=_bool(raw, "tie_word_embeddings"),
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


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How one engine runs a model."""

    model: str | Path
    """Folder with config.json, safetensors and tokenizer.json."""
    dtype: str = "float32"
    """Number format of weights and activations: `float32` or `bfloat16`. The gate stays fp32."""
    expert_format: str = "model"
    """Number format of the experts: `model` is `dtype`; `int8` quantises their weights by output
    channel at load and their rows, one by one, as they come (W8A8). All else stays in `dtype`."""
    deterministic: bool = False
    """Bitwise equal logits whatever else is in the batch; fp32 only, about 4 times slower."""
    num_devices: int = 1
    """Logical devices over which experts and sequences are spread, in this one process."""
    num_ranks: int = 1
    """Processes over which they are spread; above 1, each is a device."""
    attention_ranks: int = 0
    """Of the ranks, so many, the first ones, own the sequences and the others hold the experts; 0:
    every rank does both."""
    exchange: str = "grouped"
    """How ranks exchange rows: `naive`, `request`, `grouped` or `overlapped`."""
    small_batch_rows: int = 8
    """Steps with fewer rows, over all ranks, are exchanged request by request; 0 never."""
    exchange_timeout_s: float = 10.0
    """Longest wait for other ranks in one exchange."""
    heartbeat_timeout_s: float = 3.0
    """A rank without a sign of life for so long is given up."""
    migration_deadline_s: float = 30.0
    """A new table is given up when a rank has not gathered its experts by then."""
    max_running: int = 64
    """Most sequences in one step."""
    max_step_tokens: int = 256
    """Most rows in one step; longer prompts are prefilled in chunks."""
    block_size: int = 16
    """Tokens in one block of the KV cache."""
    num_blocks: int = 2048
    """Blocks of the KV cache, shared by all sequences."""
    max_model_len: int | None = None
    """Longest prompt + output in tokens; None takes the model's own limit."""
    num_threads: int | None = None
    """Threads of one product; None leaves torch's setting, deterministic mode takes 1."""
    seed: int = 0
    """Base of the seeds of requests that bring none."""
    hash_logits: bool = False
    """Whether completions carry a SHA-256 over the logits they were sampled from."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str | Path) or not str(self.model):
            raise ConfigError(f"model ({self.model!r}) must name a folder with config.json.")
        one_of("dtype", self.dtype, DTYPES)
        one_of("expert_format", self.expert_format, EXPERT_FORMATS)
        for name in ("max_running", "max_step_tokens", "block_size", "num_blocks"):
            at_least(name, getattr(self, name), 1)
        within("num_devices", self.num_devices, 1, MAX_DEVICES)
        within("num_ranks", self.num_ranks, 1, MAX_RANKS)
        if self.num_ranks > 1 and self.num_devices not in (1, self.num_ranks):
            raise ConfigError(
                f"num_devices ({self.num_devices}) must be left at 1 with num_ranks "
                f"({self.num_ranks}): each rank is a device."
            )
        if self.attention_ranks:
            if self.num_ranks == 1:
                raise ConfigError(
                    f"attention_ranks ({self.attention_ranks}) must be 0 in one process; give it "
                    "ranks (--ranks)."
                )
            within("attention_ranks", self.attention_ranks, 0, self.num_ranks - 1)
        at_least("attention_ranks", self.attention_ranks, 0)
        one_of("exchange", self.exchange, EXCHANGES)
        at_least("small_batch_rows", self.small_batch_rows, 0)
        for name in ("exchange_timeout_s", "heartbeat_timeout_s", "migration_deadline_s"):
            if not 0 < _number(name, getattr(self, name)) <= 3600:
                raise ConfigError(
                    f"{name} ({getattr(self, name)}) must be above 0 and at most 3600 seconds."
                )
        if self.max_model_len is not None:
            at_least("max_model_len", self.max_model_len, 1)
        if self.num_threads is not None:
            within("num_threads", self.num_threads, 1, MAX_THREADS)
        within("seed", self.seed, 0, MAX_SEED)
        if self.deterministic and self.dtype != "float32":
            raise ConfigError(
                f"dtype ({self.dtype}) must be float32 in deterministic mode; "
                "drop --deterministic or take --dtype float32."
            )
        if self.deterministic and self.expert_format != "model":
            raise ConfigError(
                f"expert_format ({self.expert_format}) must be model in deterministic mode, which "
                "runs in fp32; drop one of the two."
            )
        if self.deterministic and self.num_threads not in (None, 1):
            raise ConfigError(
                f"num_threads ({self.num_threads}) must be 1 in deterministic mode, because a "
                "product's order of summation changes with its threads."
            )

    @property
    def number_format(self) -> str:
        """The format that experts run rows in, as recorded with each decision."""
        return self.dtype if self.expert_format == "model" else self.expert_format

    @property
    def scheme(self) -> str:
        """The number formats in force, in words."""
        if self.expert_format == "model":
            return f"all in {self.dtype}, the gate in float32"
        return (
            "experts in int8 (W8A8: weights with one scale an output channel, rows with one scale "
            f"each), all else in {self.dtype}, the gate in float32"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request's next tokens are chosen and when it ends."""

    max_tokens: int | None = 64
    """Most new tokens; 0 only runs the prompt, None goes on to the model's longest text."""
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probabilities sum to at least this."""
    seed: int | None = None
    """Same seed, same prompt, same text; None derives one from the engine's seed."""
    stop: tuple[str, ...] = ()
    """Strings that end the text and are not part of it."""
    logprobs: int | None = None
    """Also return the n best log-probabilities at each position; None returns none."""
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            at_least("max_tokens", self.max_tokens, 0)
        at_least("top_k", self.top_k, 0)
        if not 0.0 <= _number("temperature", self.temperature) <= 100.0:
            raise ConfigError(f"temperature ({self.temperature}) must lie between 0 and 100.")
        if not 0.0 < _number("top_p", self.top_p) <= 1.0:
            raise ConfigError(f"top_p ({self.top_p}) must be above 0 and at most 1.")
        if self.seed is not None:
            within("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            within("logprobs", self.logprobs, 0, 20)
        if not isinstance(self.stop, tuple | list) or not all(
            isinstance(s, str) and s for s in self.stop
        ):
            raise ConfigError(f"stop ({self.stop!r}) must be a tuple of non-empty strings.")


def from_mapping(cls: type[C], values: Mapping[str, Any]) -> C:
    """Build a config dataclass from a mapping, refusing keys it does not have.

    Raises:
        ConfigError: an unknown key (the nearest known one is named) or a missing one.
    """
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise ConfigError(
                f"unknown option {key!r} for {cls.__name__}{nearest(key, known)} "
                f"known options: {', '.join(known)}."
            )
    try:
        return cls(**values)
    except TypeError as wrong:
        raise ConfigError(f"{cls.__name__} cannot be made: {wrong}.") from None


def one_of(name: str, value: str, allowed: Iterable[str]) -> None:
    """Raise `ConfigError` unless `value` is one of `allowed`."""
    allowed = tuple(allowed)
    if value not in allowed:
        raise ConfigError(
            f"{name} ({value}) must be one of {', '.join(allowed)}{nearest(value, allowed)}"
        )


def at_least(name: str, value: Any, low: int) -> None:
    """Raise `ConfigError` unless `value` is an int (not a bool) of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name} ({value!r}) must be a whole number of at least {low}.")


def within(name: str, value: Any, low: int, high: int) -> None:
    """Raise `ConfigError` unless `value` is an int (not a bool) from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} ({value!r}) must lie between {low} and {high}.")


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} ({value!r}) must be a number.")
    return float(value)


_OFF = (None, False, 0)
_COMPUTED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "use_sliding_window": (False,),
    "quantization_config": (None,),
    "partial_rotary_factor": (1.0, None),
    "swiglu_limit": _OFF,
}
"""What a key may be: the value that is computed, then others that mean the same."""
_COMPUTED_MOE: Mapping[str, tuple[Any, ...]] = {
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
    "moe_layer_freq": (1, None),
    "topk_method": ("greedy", None),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_groups"), (1, *_OFF)),
    **dict.fromkeys(
        ("scoring_func", "score_function", "moe_router_score_function"), ("softmax", None)
    ),
    **dict.fromkeys(("first_k_dense_replace", "n_shared_experts"), _OFF),
    **dict.fromkeys(("shared_expert_intermediate_size", "apply_router_weight_on_input"), _OFF),
    **dict.fromkeys(("router_bias", "use_routing_bias", "use_expert_bias"), _OFF),
    **dict.fromkeys(("e_score_correction_bias", "router_logit_softcapping"), _OFF),
}


def _refuse_unsupported(raw: Mapping[str, Any], family: str) -> None:
    """Refuse what would change the numbers in silence if it were ignored."""
    tables = (_COMPUTED, _COMPUTED_MOE) if family == "qwen3_moe" else (_COMPUTED,)
    for key, allowed in (item for table in tables for item in table.items()):
        if key in raw and raw[key] not in allowed:
            only = "models without it" if allowed[0] is None else repr(allowed[0])
            raise ConfigError(
                f"config.json sets {key} to {raw[key]!r}; this engine computes only {only}."
            )
    kinds = raw.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise ConfigError(
            f"config.json sets layer_types to {kinds!r}; this engine computes only "
            "'full_attention' in every layer."
        )
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(raw.get(key) or {}, Mapping):
            raise ConfigError(f"config.json sets {key} to {raw[key]!r}; it must be an object.")
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        raise ConfigError(
            f"config.json asks for rope scaling {kind!r}; this engine computes only 'default'."
        )
    if scaling.get("partial_rotary_factor", 1.0) not in _COMPUTED["partial_rotary_factor"]:
        raise ConfigError(
            "config.json sets partial_rotary_factor to "
            f"{scaling['partial_rotary_factor']!r}; this engine computes only 1.0."
        )


def _num_experts(raw: Mapping[str, Any]) -> Any:
    """Return E; transformers 5 writes `num_local_experts`, everything before it the other name."""
    local, plain = raw.get("num_local_experts"), raw.get("num_experts")
    if local is None and plain is None:
        raise KeyError("num_experts")
    if None not in (local, plain) and local != plain:
        raise ConfigError(
            f"config.json sets num_local_experts to {local!r} and num_experts to {plain!r}; they "
            "must be equal."
        )
    found = plain if local is None else local
    within("num_experts", found, 1, MAX_EXPERTS)
    return found


def _rope_theta(raw: Mapping[str, Any]) -> float:
    parameters = raw.get("rope_parameters") or {}
    return float(raw.get("rope_theta", parameters.get("rope_theta", 10000.0)))


def _bool(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key, False)
    if not isinstance(value, bool):
        raise ConfigError(f"config.json sets {key} to {value!r}; it must be true or false.")
    return value


def _ids(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
