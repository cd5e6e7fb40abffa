"""Grouped-query attention with q/k norm and rotary positions, over the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.config import ModelConfig
from engine.kernels.registry import Ops
from engine.model.kv_cache import KVCache
from engine.model.layers import Linear, RMSNorm
from engine.model.step import StepContext


class Attention(nn.Module):
    """One layer's attention; q, k and v come from one product.

    Source: grouped queries arXiv 2305.13245; q/k norm as in Qwen3 (arXiv 2505.09388).
    """

    def __init__(self, config: ModelConfig, layer: int, ops: Ops) -> None:
        super().__init__()
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.split = [heads + kv_heads, kv_heads]
        self.num_heads, self.eps = heads, config.rms_norm_eps
        self.head_dim, self.layer, self.ops = head_dim, layer, ops
        self.qkv = Linear(config.hidden_size, sum(self.split) * head_dim, ops)
        self.q_norm = RMSNorm(head_dim, self.eps, ops)
        self.k_norm = RMSNorm(head_dim, self.eps, ops)
        self.out = Linear(heads * head_dim, config.hidden_size, ops)

    def forward(self, x_TD: Tensor, cache: KVCache, step: StepContext) -> Tensor:
        """Attend T rows to their sequences' pasts; returns (T, D)."""
        qkv = self.qkv(x_TD).view(x_TD.shape[0], sum(self.split), self.head_dim)
        qk_THd, v_THd = torch.split(qkv, self.split, dim=1)
        qk_THd = self.ops.norm_and_rotate(
            qk_THd, self.num_heads, self.q_norm.weight, self.k_norm.weight, self.eps, step.rotary
        )
        q_THd, k_THd = qk_THd[:, : self.num_heads], qk_THd[:, self.num_heads :]
        cache.write(self.layer, step.places, k_THd, v_THd)
        keys, values = cache.keys[self.layer], cache.values[self.layer]
        out_THd: Tensor = self.ops.attention(q_THd, keys, values, step.plan)
        projected: Tensor = self.out(out_THd.flatten(1))
        return projected
