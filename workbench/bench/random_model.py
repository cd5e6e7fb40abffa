"""A model of a wished shape with random weights, in a folder as the engine reads them.

It writes nonsense and routes evenly; its times are those of its shape. For measurements alone.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Of a Qwen3-MoE model; D is `heads` times 64."""

    layers: int
    heads: int
    experts: int
    top_k: int
    expert_width: int

    @property
    def width(self) -> int:
        """D."""
        return 64 * self.heads

    def words(self) -> str:
        """Say it in a few words."""
        return (
            f"{self.layers} layers, {self.experts} experts, top {self.top_k}, D {self.width}, "
            f"F {self.expert_width}"
        )


LARGE = Shape(layers=2, heads=16, experts=64, top_k=8, expert_width=512)
"""An expert is 8 times as large as the bundled model's; a row takes 32 times the work a layer."""


def write(folder: Path, like: Path, shape: Shape, *, seed: int = 0) -> Path:
    """Write a model of `shape` in bf16 and return its folder.

    Args:
        folder: to be made.
        like: a model folder whose tokenizer and other settings it takes.
        shape: its size.
        seed: of the weights.
    """
    folder.mkdir(parents=True)
    raw = json.loads((like / "config.json").read_text(encoding="utf-8"))
    raw |= {
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": 64,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "moe_intermediate_size": shape.expert_width,
        "intermediate_size": shape.expert_width,
    }
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.copyfile(like / name, folder / name)
    generator = torch.Generator().manual_seed(seed)
    tensors = dict(_tensors(shape, raw["vocab_size"], generator))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _tensors(shape: Shape, vocab: int, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    width, wide = shape.width, shape.expert_width

    def random(*size: int) -> Tensor:
        return (torch.randn(size, generator=generator) / math.sqrt(size[-1])).bfloat16()

    def ones(size: int) -> Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    yield "model.embed_tokens.weight", random(vocab, width)
    yield "model.norm.weight", ones(width)
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}.{norm}.weight", ones(width)
        for norm in ("q_norm", "k_norm"):
            yield f"{at}.self_attn.{norm}.weight", ones(64)
        for part in "qkvo":
            yield f"{at}.self_attn.{part}_proj.weight", random(width, width)
        yield f"{at}.mlp.gate.weight", random(shape.experts, width)
        for expert in range(shape.experts):
            name = f"{at}.mlp.experts.{expert}"
            yield f"{name}.gate_proj.weight", random(wide, width)
            yield f"{name}.up_proj.weight", random(wide, width)
            yield f"{name}.down_proj.weight", random(width, wide)
