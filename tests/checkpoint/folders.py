"""A tiny random Qwen3-MoE model as plain tensors, and its folders in every layout."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.checkpoint.manifest import write_manifest
from engine.config import ModelConfig

Tensors = dict[str, torch.Tensor]

SHAPE: dict[str, object] = {
    "model_type": "qwen3_moe",
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "moe_intermediate_size": 12,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


def write_folder(
    folder: Path,
    tensors: Tensors,
    *,
    raw: dict[str, object] = SHAPE,
    shards: int = 1,
    manifest: bool = True,
) -> Path:
    """Write a whole model folder and return it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "README.md").write_text("What it is.\n")
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        save_shards(tensors, folder, shards)
    if manifest:
        write_manifest(folder)
    return folder


def save_shards(tensors: Tensors, folder: Path, shards: int) -> None:
    where = {
        name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors"
        for i, name in enumerate(tensors)
    }
    for shard in set(where.values()):
        held = {name: tensor for name, tensor in tensors.items() if where[name] == shard}
        save_file(held, folder / shard, metadata={"format": "pt"})
    index = {"metadata": {"format": "pt"}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def random_tensors(raw: dict[str, object]) -> Tensors:
    c = ModelConfig.from_hf(raw)
    heads, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, c.hidden_size),
        "model.norm.weight": (c.hidden_size,),
    }
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    for i in range(c.num_layers):
        at = f"model.layers.{i}."
        shapes |= {
            at + "input_layernorm.weight": (c.hidden_size,),
            at + "post_attention_layernorm.weight": (c.hidden_size,),
            at + "self_attn.q_proj.weight": (heads, c.hidden_size),
            at + "self_attn.k_proj.weight": (keys, c.hidden_size),
            at + "self_attn.v_proj.weight": (keys, c.hidden_size),
            at + "self_attn.o_proj.weight": (c.hidden_size, heads),
            at + "self_attn.q_norm.weight": (c.head_dim,),
            at + "self_attn.k_norm.weight": (c.head_dim,),
        }
        feed_forwards = {at + "mlp.": c.intermediate_size}
        if c.is_moe:
            shapes[at + "mlp.gate.weight"] = (c.num_experts, c.hidden_size)
            feed_forwards = {
                f"{at}mlp.experts.{e}.": c.moe_intermediate_size for e in range(c.num_experts)
            }
        for prefix, width in feed_forwards.items():
            shapes |= {
                prefix + "gate_proj.weight": (width, c.hidden_size),
                prefix + "up_proj.weight": (width, c.hidden_size),
                prefix + "down_proj.weight": (c.hidden_size, width),
            }
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def stacked(tensors: Tensors, config: ModelConfig) -> Tensors:
    """Rewrite one tensor per expert as one [E, ...] tensor per matrix."""
    out = {name: t for name, t in tensors.items() if ".experts." not in name}
    for i in range(config.num_layers):
        at = f"model.layers.{i}.mlp.experts."
        for matrix in ("gate_proj", "up_proj", "down_proj"):
            out[at + matrix] = torch.stack(
                [tensors[f"{at}{e}.{matrix}.weight"] for e in range(config.num_experts)]
            )
    return out


def fused(tensors: Tensors, config: ModelConfig) -> Tensors:
    """Rewrite one tensor per expert as `gate_up_proj` [E, 2F, D] and `down_proj` [E, D, F]."""
    out = stacked(tensors, config)
    for i in range(config.num_layers):
        at = f"model.layers.{i}.mlp.experts."
        out[at + "gate_up_proj"] = torch.cat(
            [out.pop(at + "gate_proj"), out.pop(at + "up_proj")], dim=1
        )
    return out
