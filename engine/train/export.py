"""Writes a trained network as a model folder: Hugging Face names, bf16 safetensors, tokenizer.

transformers loads the folder as Qwen3MoeForCausalLM or Qwen3ForCausalLM; our engine reads the same
files. `python -m engine.train.export` writes the folder of a checkpoint before a run has ended.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from engine.config import ModelConfig
from engine.train.network import MODELS
from engine.train.tokenizer import write_tokenizer

ARCHITECTURES = {"qwen3_moe": "Qwen3MoeForCausalLM", "qwen3": "Qwen3ForCausalLM"}

LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "attention.out.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "moe.gate.weight": "mlp.gate.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}
"""Tensors of a layer that keep their form; the others are split in `_split`."""


def export_model(
    state: Mapping[str, Tensor], config: ModelConfig, tokenizer: Tokenizer, folder: Path
) -> None:
    """Write one model folder, its manifest last."""
    from engine.checkpoint.manifest import write_manifest

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in hf_tensors(state, config)
    }
    weights = folder / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    _write_json(folder / "config.json", hf_config(config))
    _write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": config.bos_token_id,
            "eos_token_id": config.eos_token_id,
            "pad_token_id": config.pad_token_id,
            "do_sample": False,
        },
    )
    write_tokenizer(tokenizer, folder, config.max_position_embeddings)
    write_manifest(folder)


def hf_tensors(state: Mapping[str, Tensor], config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, tensor) for a state in the engine's names."""
    for name, tensor in state.items():
        if name == "embed.weight":
            yield "model.embed_tokens.weight", tensor
        elif name == "norm.weight":
            yield "model.norm.weight", tensor
        else:
            _, layer, rest = name.split(".", 2)
            prefix = f"model.layers.{layer}"
            if rest in LAYER_NAMES:
                yield f"{prefix}.{LAYER_NAMES[rest]}", tensor
            else:
                yield from _split(prefix, rest, tensor, config)


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """Return the contents of config.json."""
    raw: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "dtype": "bfloat16",
    }
    if config.is_moe:
        raw |= {
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.top_k,
            "moe_intermediate_size": config.moe_intermediate_size,
            "norm_topk_prob": config.norm_topk_prob,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "output_router_logits": False,
        }
    return raw


def _split(
    prefix: str, rest: str, tensor: Tensor, config: ModelConfig
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parts of a fused tensor; their rows are in the order of the names."""
    if rest == "attention.qkv.weight":
        for letter, part in zip("qkv", tensor.chunk(3), strict=True):
            yield f"{prefix}.self_attn.{letter}_proj.weight", part
    elif rest == "mlp.gate_up.weight":
        for kind, part in zip(("gate", "up"), tensor.chunk(2), strict=True):
            yield f"{prefix}.mlp.{kind}_proj.weight", part
    elif rest == "moe.experts.gate_up":
        for expert, rows in enumerate(tensor):
            for kind, part in zip(("gate", "up"), rows.chunk(2), strict=True):
                yield f"{prefix}.mlp.experts.{expert}.{kind}_proj.weight", part
    else:
        assert rest == "moe.experts.down", f"no Hugging Face name for {rest}"
        for expert, part in enumerate(tensor):
            yield f"{prefix}.mlp.experts.{expert}.down_proj.weight", part


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Export the checkpoint of a run folder, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m engine.train.export", description=main.__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="moe")
    parser.add_argument("--run", type=Path, required=True, help="run folder with a checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")
    options = parser.parse_args(arguments)
    saved = torch.load(options.run / "checkpoint.pt", weights_only=True)
    tokenizer = Tokenizer.from_file(str(options.run / "tokenizer.json"))
    export_model(saved["network"], MODELS[options.model], tokenizer, options.out)
    print(f"exported step {saved['step']} to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
