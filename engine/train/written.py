"""Text that the target itself writes, with what it thought at every token: a draft's lesson.

A draft is asked about the target's own text, not about the corpus, so that is what it learns from.
The target continues prompts of the training split greedily, with a cache; at every position its
most likely tokens and their probabilities are kept as soft labels. Called by `engine.train.distil`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.train.batches import Stream
from engine.train.network import Attention, Network, rotate
from engine.train.tokenizer import BOS_ID

KEPT = 8
"""Most likely tokens kept at each position."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """N texts of T tokens, and the target's opinion at each of their positions but the last."""

    ids_NT: Tensor
    """int16; the first tokens are the prompt's."""
    likely_NTK: Tensor
    """(N, T - 1, K) int16: the most likely next tokens, best first."""
    weights_NTK: Tensor
    """(N, T - 1, K) float16: their probabilities, which sum to 1 over the K kept."""

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (ids (B, T - 1), likely (B, T - 1, K), weights (B, T - 1, K)) of some texts."""
        return (
            self.ids_NT[rows, :-1].long(),
            self.likely_NTK[rows].long(),
            self.weights_NTK[rows].float(),
        )

    def save(self, path: Path) -> None:
        """Write one file."""
        torch.save((self.ids_NT, self.likely_NTK, self.weights_NTK), path)

    @classmethod
    def read(cls, path: Path) -> Written:
        """Read what `save` wrote."""
        ids_NT, likely_NTK, weights_NTK = torch.load(path, weights_only=True)
        return cls(ids_NT=ids_NT, likely_NTK=likely_NTK, weights_NTK=weights_NTK)


def draw_prompts(
    streams: Mapping[str, Stream], shares: Mapping[str, float], count: int, length: int, seed: int
) -> Tensor:
    """Draw `count` prompts (count, length) int64 from the streams, each begun with `<|bos|>`."""
    numbers = np.random.default_rng((seed, count))
    names = list(streams)
    weights = np.array([shares[name] for name in names])
    chosen = numbers.choice(len(names), size=count, p=weights / weights.sum())
    prompts = np.empty((count, length), dtype=np.int64)
    for prompt, index in zip(prompts, chosen, strict=True):
        stream = streams[names[index]]
        start = numbers.integers(0, len(stream) - length)
        prompt[:] = stream[start : start + length]
    prompts[:, 0] = BOS_ID
    return torch.from_numpy(prompts)


@torch.no_grad()
def write(target: Network, prompts_BT: Tensor, num_new: int) -> Written:
    """Let `target`, in evaluation mode, continue every prompt greedily by `num_new` tokens."""
    cached = _Cached(target, len(prompts_BT), prompts_BT.shape[1] + num_new)
    ids_BT, likely, weights = prompts_BT, [], []
    logits_BTV = cached.run(prompts_BT)
    for written in range(num_new + 1):
        best = logits_BTV.float().softmax(-1).topk(KEPT, dim=-1)
        likely.append(best.indices.to(torch.int16))
        weights.append((best.values / best.values.sum(-1, keepdim=True)).half())
        if written == num_new:
            break
        next_B1 = best.indices[:, -1:, 0]
        ids_BT = torch.cat([ids_BT, next_B1], dim=1)
        logits_BTV = cached.run(next_B1)
    return Written(
        ids_NT=ids_BT.to(torch.int16),
        likely_NTK=torch.cat(likely, dim=1)[:, :-1],
        weights_NTK=torch.cat(weights, dim=1)[:, :-1],
    )


class _Cached:
    """A network that runs texts of one length together and remembers their keys and values."""

    def __init__(self, network: Network, batch: int, length: int) -> None:
        config = network.config
        shape = (batch, config.num_heads, length, config.head_dim)
        self.network, self.done = network, 0
        self.layers: list[Any] = list(network.layers)
        self.caches = [
            (torch.empty(shape, dtype=torch.bfloat16), torch.empty(shape, dtype=torch.bfloat16))
            for _ in network.layers
        ]

    def run(self, ids_BT: Tensor) -> Tensor:
        """Run the next T tokens of every text; returns their logits (B, T, V) bf16."""
        network, start, end = self.network, self.done, self.done + ids_BT.shape[1]
        x = network.embed(ids_BT).bfloat16()
        cos, sin = (table[start:end].bfloat16() for table in (network.cos, network.sin))
        for layer, cache in zip(self.layers, self.caches, strict=True):
            x = x + self._attend(layer.attention, layer.attn_norm(x), cos, sin, cache)
            normed = layer.ffn_norm(x)
            x = x + (layer.moe(normed)[0] if hasattr(layer, "moe") else layer.mlp(normed))
        self.done = end
        return F.linear(network.norm(x), network.embed.weight.bfloat16())

    def _attend(
        self, own: Attention, x_BTD: Tensor, cos: Tensor, sin: Tensor, cache: tuple[Tensor, Tensor]
    ) -> Tensor:
        batch, length, _ = x_BTD.shape
        start, end = self.done, self.done + length
        qkv = F.linear(x_BTD, own.qkv.weight.bfloat16())
        q, k, v = qkv.view(batch, length, 3, own.num_heads, own.head_dim).permute(2, 0, 3, 1, 4)
        keys, values = cache
        keys[:, :, start:end] = rotate(own.k_norm(k), cos, sin)
        values[:, :, start:end] = v
        mixed = F.scaled_dot_product_attention(
            rotate(own.q_norm(q), cos, sin),
            keys[:, :, :end],
            values[:, :, :end],
            is_causal=length > 1,
        )
        assert length == 1 or start == 0, "only the first run may have several tokens"
        return F.linear(mixed.transpose(1, 2).reshape(batch, length, -1), own.out.weight.bfloat16())
