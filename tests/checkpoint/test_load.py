from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.families import FAMILIES
from engine.checkpoint.load import SHOWN_NAMES, assignments, read_config
from engine.config import ModelConfig
from engine.errors import CheckpointError, ConfigError
from tests.checkpoint.folders import (
    SHAPE,
    Tensors,
    fused,
    random_tensors,
    stacked,
    write_folder,
)

DENSE = {k: v for k, v in SHAPE.items() if "experts" not in k} | {"model_type": "qwen3"}
TIED = SHAPE | {"tie_word_embeddings": True}
CONFIG = ModelConfig.from_hf(SHAPE)
LAYOUTS = {
    "one tensor per expert": lambda tensors, config: tensors,
    "stacked experts": stacked,
    "gate and up fused": fused,
}


def test_every_layout_in_the_table_is_tested() -> None:
    assert set(LAYOUTS) == set(FAMILIES["qwen3_moe"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shards", [1, 4])
def test_every_layout_gives_the_same_parameters(tmp_path: Path, layout: str, shards: int) -> None:
    tensors = random_tensors(SHAPE)
    folder = write_folder(tmp_path / "model", LAYOUTS[layout](tensors, CONFIG), shards=shards)
    assert read_config(folder) == CONFIG
    assert_equal(load(folder, CONFIG), by_hand(tensors, CONFIG))


def test_a_dense_model_loads(tmp_path: Path) -> None:
    config, tensors = ModelConfig.from_hf(DENSE), random_tensors(DENSE)
    folder = write_folder(tmp_path / "model", tensors, raw=DENSE)
    assert_equal(load(folder, config), by_hand(tensors, config))


def test_a_tied_model_loads_with_and_without_a_saved_head(tmp_path: Path) -> None:
    config, tensors = ModelConfig.from_hf(TIED), random_tensors(TIED)
    wanted = by_hand(tensors, config)
    assert "lm_head.weight" not in wanted
    assert_equal(load(write_folder(tmp_path / "a", tensors, raw=TIED), config), wanted)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    assert_equal(load(write_folder(tmp_path / "b", tensors, raw=TIED), config), wanted)
    tensors["lm_head.weight"][3, 3] += 1
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        load(write_folder(tmp_path / "c", tensors, raw=TIED), config)


def test_tensors_arrive_in_the_number_format_of_the_file(tmp_path: Path) -> None:
    tensors = {name: t.bfloat16() for name, t in random_tensors(SHAPE).items()}
    folder = write_folder(tmp_path / "model", tensors)
    assert {a.tensor.dtype for a in assignments(folder, CONFIG)} == {torch.bfloat16}


@pytest.mark.parametrize("change", ["swap two experts", "swap gate and up", "drop the last row"])
def test_the_comparison_would_see_a_wrong_place(tmp_path: Path, change: str) -> None:
    """Negative control of `assert_equal` over `by_hand`."""
    tensors = random_tensors(SHAPE)
    loaded = load(write_folder(tmp_path / "model", tensors), CONFIG)
    parameter = loaded["layers.1.moe.experts.gate_up"]
    if change == "swap two experts":
        parameter[[0, 1]] = parameter[[1, 0]].clone()
    elif change == "swap gate and up":
        parameter[:] = parameter.roll(CONFIG.moe_intermediate_size, dims=1)
    else:
        parameter[2, -1] = float("nan")
    with pytest.raises(AssertionError):
        assert_equal(loaded, by_hand(tensors, CONFIG))


def test_an_unknown_prefix_is_refused_with_the_unmatched_names_of_both_sides(
    tmp_path: Path,
) -> None:
    tensors = {f"wrapped.{name}": t for name, t in random_tensors(SHAPE).items()}
    text = refusal(write_folder(tmp_path / "model", tensors))
    assert "do not fit qwen3_moe" in text
    assert text.count("wrapped.") == SHOWN_NAMES
    assert "not known: wrapped.lm_head.weight, wrapped.model.embed_tokens.weight" in text
    assert "not found: lm_head.weight, model.embed_tokens.weight" in text
    assert text.count(f"and {39 - SHOWN_NAMES} more") == 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_missing_or_unknown_name_is_named_in_the_layout_at_hand(
    tmp_path: Path, layout: str
) -> None:
    tensors = LAYOUTS[layout](random_tensors(SHAPE), CONFIG)
    gone = next(name for name in reversed(tensors) if "down_proj" in name)
    tensors["model.layers.0.mlp.experts.extra"] = tensors.pop(gone)
    text = refusal(write_folder(tmp_path / "model", tensors))
    assert f"do not fit qwen3_moe ({layout})" in text
    assert "not known: model.layers.0.mlp.experts.extra; " in text
    assert f"not found: {gone}." in text


def test_layouts_may_not_be_mixed(tmp_path: Path) -> None:
    one, other = random_tensors(SHAPE), fused(random_tensors(SHAPE), CONFIG)
    text = refusal(write_folder(tmp_path / "model", one | other))
    assert "not known: model.layers.0.mlp.experts." in text


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.1.mlp.experts.2.down_proj.weight", (12, 16)),
        ("model.layers.0.self_attn.k_proj.weight", (32, 16)),
        ("model.norm.weight", (1, 16)),
        ("model.norm.weight", ()),
        ("model.embed_tokens.weight", (41, 16)),
    ],
)
def test_a_wrong_shape_is_refused_with_both_shapes(
    tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    tensors = random_tensors(SHAPE)
    right = tuple(tensors[name].shape)
    tensors[name] = torch.zeros(shape)
    text = refusal(write_folder(tmp_path / "model", tensors))
    assert f"tensor {name} has shape {shape}, but config.json asks for {right}" in text
    assert "model.safetensors" in text


def test_integer_weights_are_refused_instead_of_being_read_as_numbers(tmp_path: Path) -> None:
    tensors = random_tensors(SHAPE)
    tensors["model.norm.weight"] = torch.ones(16, dtype=torch.int8)
    text = refusal(write_folder(tmp_path / "model", tensors))
    assert "tensor model.norm.weight is torch.int8, but only torch.float32" in text


def test_checks_are_done_before_the_first_tensor_is_asked_for(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", random_tensors(SHAPE))
    with pytest.raises(CheckpointError):
        assignments(folder, ModelConfig.from_hf(SHAPE | {"num_hidden_layers": 3}))


def test_an_unknown_family_names_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    with pytest.raises(ConfigError, match="qwen3_moe, qwen3"):
        read_config(tmp_path)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("max_shard_size", ["5GB", "12KB"])
def test_what_transformers_saves_loads(tmp_path: Path, fuse: bool, max_shard_size: str) -> None:
    """Saved as it does by default (one tensor per expert) and as it holds them (fused)."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(3)
    raw = {key: value for key, value in SHAPE.items() if key != "model_type"}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**raw))
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size, save_original_format=not fuse)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 or max_shard_size == "5GB"
    config = read_config(tmp_path)
    assert (config.num_experts, config.top_k, config.head_dim) == (3, 2, 8)
    state = dict(model.state_dict())
    loaded = load(tmp_path, config)
    for i in range(config.num_layers):
        at = f"model.layers.{i}.mlp.experts."
        assert torch.equal(loaded[f"layers.{i}.moe.experts.gate_up"], state[at + "gate_up_proj"])
        assert torch.equal(loaded[f"layers.{i}.moe.experts.down"], state[at + "down_proj"])
    assert torch.equal(loaded["embed.weight"], state["model.embed_tokens.weight"])


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        load(folder, read_config(folder))
    text = str(refused.value)
    assert "\n" not in text
    return text


def load(folder: Path, config: ModelConfig) -> Tensors:
    """Fill NaN parameters as the runtime does, and check that each element is written once."""
    parameters = {
        name: torch.full_like(parameter, float("nan"))
        for name, parameter in by_hand(random_tensors(hf(config)), config).items()
    }
    written = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    for a in assignments(folder, config):
        assert parameters[a.target][a.index].shape == a.tensor.shape
        parameters[a.target][a.index] = a.tensor.float()
        written[a.target][a.index] += 1
    for name, times in written.items():
        assert bool((times == 1).all()), f"{name}: not every element is written exactly once"
    return parameters


def hf(config: ModelConfig) -> dict[str, object]:
    raw = SHAPE if config.is_moe else DENSE
    return raw | {"tie_word_embeddings": config.tie_word_embeddings}


def by_hand(tensors: Tensors, config: ModelConfig) -> Tensors:
    """Build our parameters from one tensor per expert by concatenation, without the tables."""
    out = {
        "embed.weight": tensors["model.embed_tokens.weight"],
        "norm.weight": tensors["model.norm.weight"],
    }
    if not config.tie_word_embeddings:
        out["lm_head.weight"] = tensors["lm_head.weight"]
    for i in range(config.num_layers):
        theirs, ours = f"model.layers.{i}.", f"layers.{i}."
        take: Any = lambda name, at=theirs: tensors[f"{at}{name}.weight"]  # noqa: E731
        attention = [take(f"self_attn.{part}_proj") for part in "qkv"]
        out |= {
            ours + "attn_norm.weight": take("input_layernorm"),
            ours + "attention.qkv.weight": torch.cat(attention),
            ours + "attention.q_norm.weight": take("self_attn.q_norm"),
            ours + "attention.k_norm.weight": take("self_attn.k_norm"),
            ours + "attention.out.weight": take("self_attn.o_proj"),
            ours + "ffn_norm.weight": take("post_attention_layernorm"),
        }
        if not config.is_moe:
            both = [take("mlp.gate_proj"), take("mlp.up_proj")]
            out[ours + "mlp.gate_up.weight"] = torch.cat(both)
            out[ours + "mlp.down.weight"] = take("mlp.down_proj")
            continue
        experts = range(config.num_experts)
        gate = torch.stack([take(f"mlp.experts.{e}.gate_proj") for e in experts])
        up = torch.stack([take(f"mlp.experts.{e}.up_proj") for e in experts])
        out[ours + "moe.gate.weight"] = take("mlp.gate")
        out[ours + "moe.experts.gate_up"] = torch.cat([gate, up], dim=1)
        out[ours + "moe.experts.down"] = torch.stack(
            [take(f"mlp.experts.{e}.down_proj") for e in experts]
        )
    return out


def assert_equal(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_our_parameter_names_are_those_of_the_tables() -> None:
    wanted = {re.sub(r"\d+", "{i}", n) for n in by_hand(random_tensors(SHAPE), CONFIG)}
    wanted |= {
        re.sub(r"\d+", "{i}", n) for n in by_hand(random_tensors(DENSE), ModelConfig.from_hf(DENSE))
    }
    from engine.checkpoint.families import BODY, HEAD

    rules = [
        *BODY,
        HEAD,
        *(r for layouts in FAMILIES.values() for t in layouts.values() for r in t),
    ]
    assert {rule.target for rule in rules} == wanted
