"""Reading a Hugging Face `config.json`: what its keys may be, and where they stand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.config.checks import within
from engine.errors import ConfigError

MAX_EXPERTS = 32767
"""Expert ids are 16-bit in every record."""

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


def refuse_unsupported(raw: Mapping[str, Any], family: str) -> None:
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


def num_experts(raw: Mapping[str, Any]) -> Any:
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


def rope_theta(raw: Mapping[str, Any]) -> float:
    """Return the base of the rotary positions, from either place where files have it."""
    parameters = raw.get("rope_parameters") or {}
    return float(raw.get("rope_theta", parameters.get("rope_theta", 10000.0)))


def boolean(raw: Mapping[str, Any], key: str) -> bool:
    """Return a switch, off where it is missing; a `ConfigError` if it is neither on nor off."""
    value = raw.get(key, False)
    if not isinstance(value, bool):
        raise ConfigError(f"config.json sets {key} to {value!r}; it must be true or false.")
    return value


def ids(value: Any) -> list[Any]:
    """Return one id, several or none as a list."""
    return value if isinstance(value, list) else [] if value is None else [value]
