"""Options are checked when they are made, with a sentence that helps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.config import EngineConfig, ModelConfig, SamplingParams, from_mapping
from engine.errors import ConfigError, WorkbenchError, nearest

RAW = json.loads((Path(__file__).parents[1] / "data/models/polyglot-moe/config.json").read_text())


def test_the_bundled_config_is_read():
    config = ModelConfig.from_hf(RAW)
    assert (config.num_experts, config.top_k, config.num_layers) == (8, 2, 4)
    assert config.is_moe and config.tie_word_embeddings and config.norm_topk_prob


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model_type": "qwen3_mo"}, "did you mean 'qwen3_moe'"),
        ({"num_experts_per_tok": 9}, "top_k"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope scaling 'yarn'"),
        ({"num_key_value_heads": 3}, "num_kv_heads"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": 1.9}, "hidden_size"),
        ({"hidden_size": float("inf")}, "hidden_size"),
        ({"num_hidden_layers": True}, "num_layers"),
        ({"num_attention_heads": None, "head_dim": None}, "wrong type"),
        ({"num_attention_heads": 0, "head_dim": None}, "wrong type"),
        ({"head_dim": 33}, "even"),
        ({"moe_intermediate_size": -5}, "moe_intermediate_size"),
        ({"num_local_experts": 4}, "num_local_experts"),
        ({"num_experts": 10**6}, "num_experts"),
        ({"num_experts": None, "num_local_experts": 10**6}, "num_experts"),
        ({"num_experts": -8}, "num_experts"),
        ({"num_experts": 0}, "num_experts"),
        ({"num_experts_per_tok": 1.9}, "top_k"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_parameters": None, "rope_theta": 0}, "rope_theta"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"routed_scaling_factor": float("inf")}, "routed_scaling_factor"),
        ({"norm_topk_prob": "false"}, "norm_topk_prob"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"eos_token_id": 1.5}, "eos_token_id"),
        ({"bos_token_id": {}}, "bos_token_id"),
        ({"eos_token_id": 4096}, "eos_token_id"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ],
)
def test_a_model_that_would_be_computed_wrong_is_refused(change, word):
    with pytest.raises(ConfigError, match=word):
        ModelConfig.from_hf(RAW | change)


SOMETHING_ELSE = {
    "n_group": 8,
    "topk_group": 4,
    "num_expert_groups": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "score_function": "sigmoid",
    "moe_router_score_function": "sigmoid",
    "router_bias": True,
    "use_routing_bias": True,
    "use_expert_bias": True,
    "e_score_correction_bias": [0.1] * 8,
    "n_shared_experts": 1,
    "shared_expert_intermediate_size": 512,
    "first_k_dense_replace": 3,
    "moe_layer_freq": [0, 1, 1, 1],
    "swiglu_limit": 7.0,
    "router_logit_softcapping": 30.0,
    "apply_router_weight_on_input": True,
    "partial_rotary_factor": 0.5,
    "rope_parameters": {"partial_rotary_factor": 0.5},
    "layer_types": ["sliding_attention"] + ["full_attention"] * 3,
}


@pytest.mark.parametrize("key", SOMETHING_ELSE)
def test_a_router_or_a_layer_of_another_kind_is_refused_by_name(key):
    word = "partial_rotary_factor" if key == "rope_parameters" else key
    with pytest.raises(ConfigError, match=f"{word} to .* computes only"):
        ModelConfig.from_hf(RAW | {key: SOMETHING_ELSE[key]})


def test_what_changes_nothing_is_taken():
    same = {"n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax"}
    same |= {"moe_layer_freq": 1, "partial_rotary_factor": 1.0, "n_shared_experts": 0}
    same |= {"use_expert_bias": False, "layer_types": ["full_attention"] * 4}
    assert ModelConfig.from_hf(RAW | same) == ModelConfig.from_hf(RAW)
    off = dict.fromkeys(set(SOMETHING_ELSE) - {"rope_parameters"})
    assert ModelConfig.from_hf(RAW | off) == ModelConfig.from_hf(RAW)
    dense = RAW | {"model_type": "qwen3", "n_group": 8}  # it has no router
    assert not ModelConfig.from_hf(dense).is_moe


def test_a_config_that_is_no_object_is_refused():
    with pytest.raises(ConfigError, match="must hold an object"):
        ModelConfig.from_hf([RAW])


def test_a_missing_key_is_named():
    with pytest.raises(ConfigError, match="moe_intermediate_size"):
        ModelConfig.from_hf({key: RAW[key] for key in RAW if key != "moe_intermediate_size"})


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"dtype": "float16"}, "float32, bfloat16"),
        ({"num_devices": 0}, "num_devices"),
        ({"block_size": True}, "block_size"),
        ({"deterministic": True, "dtype": "bfloat16"}, "deterministic"),
        ({"deterministic": True, "num_threads": 2}, "num_threads"),
        ({"dtype": None}, "dtype"),
        ({"num_devices": 10**9}, "num_devices"),
        ({"num_threads": 10**9}, "num_threads"),
        ({"seed": -1}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"seed": 2**64}, "seed"),
    ],
)
def test_bad_engine_options_are_refused(options, word):
    with pytest.raises(ConfigError, match=word):
        EngineConfig(model="somewhere", **options)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": "warm"},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_k": -1},
        {"seed": -1},
        {"stop": "END"},
        {"stop": ("",)},
        {"seed": 2**64},
        {"stop": None},
        {"stop": 5},
        {"logprobs": 21},
        {"logprobs": True},
        {"logprobs": 1.5},
        {"logprobs": "3"},
    ],
)
def test_bad_sampling_options_are_refused_by_name(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        SamplingParams(**options)


def test_an_unknown_option_names_the_nearest_one():
    with pytest.raises(ConfigError, match="did you mean 'num_devices'"):
        from_mapping(EngineConfig, {"model": "x", "num_device": 2})
    assert from_mapping(EngineConfig, {"model": "x", "num_devices": 2}).num_devices == 2
    with pytest.raises(ConfigError, match="model"):
        from_mapping(EngineConfig, {})


def test_every_error_ends_as_a_sentence_and_has_an_exit_code():
    assert nearest("gate.logit", ["gate.logits"]).startswith("; did you mean")
    assert nearest("zzz", ["gate.logits"]) == "."
    assert {WorkbenchError.exit_code, ConfigError.exit_code} == {1, 2}
