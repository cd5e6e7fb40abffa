"""Grouped-query attention with q/k norm and rotary positions, over the paged cache."""

from __future__ import annotations

from torch import Tensor, nn

from engine.config import ModelConfig
from engine.kernels.registry import Ops
from engine.model.kv_cache import KVCache
from engine.model.layers import Linear, RMSNorm, rotate
from engine.model.step import StepContext


class Attention(nn.Module):
    """One layer's attention; q, k and v come from one product.

    Source: grouped queries arXiv 2305.13245; q/k norm as in Qwen3 (arXiv 2505.09388).
    """

    def __init__(self, config: ModelConfig, layer: int, ops: Ops) -> None:
        super().__init__()
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.split = [heads, kv_heads, kv_heads]
        self.head_dim, self.layer, self.ops = head_dim, layer, ops
        self.qkv = Linear(config.hidden_size, sum(self.split) * head_dim, ops)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps, ops)
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps, ops)
        self.out = Linear(heads * head_dim, config.hidden_size, ops)

    def forward(self, x_TD: Tensor, cache: KVCache, step: StepContext) -> Tensor:
        """Attend T rows to their sequences' pasts; returns (T, D)."""
        qkv = self.qkv(x_TD).view(x_TD.shape[0], sum(self.split), self.head_dim)
        q_THd, k_THd, v_THd = qkv.split(self.split, dim=1)
        q_THd = rotate(self.q_norm(q_THd), step.rotary)
        k_THd = rotate(self.k_norm(k_THd), step.rotary)
        cache.write(self.layer, step.slots_T, k_THd, v_THd)
        keys, values = cache.keys[self.layer], cache.values[self.layer]
        out_THd: Tensor = self.ops.attention(q_THd, keys, values, step.plan)
        projected: Tensor = self.out(out_THd.flatten(1))
        return projected
