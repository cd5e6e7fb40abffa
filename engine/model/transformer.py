"""The decoder-only transformer, dense or Mixture-of-Experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.config import ModelConfig
from engine.kernels.dense import Product
from engine.model.attention import Attention
from engine.model.kv_cache import KVCache
from engine.model.layers import MLP, Linear, RMSNorm, Rotary, blank
from engine.model.moe import Experts, MoE
from engine.model.parts import Parts
from engine.model.step import StepContext
from engine.routing.gate import Gate


class Transformer(nn.Module):
    """Embedding, L layers, norm, head."""

    def __init__(self, config: ModelConfig, parts: Parts, num_positions: int) -> None:
        """Build the model with blank parameters; `num_positions` bounds the rotary tables."""
        super().__init__()
        self.config, self.ops, self.faults = config, parts.ops, parts.faults
        self.embed = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = Rotary(config.head_dim, config.rope_theta, num_positions)
        self.layers = nn.ModuleList(
            Layer(config, index, parts) for index in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, self.ops)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, self.ops)
        self.tied_head: Product | None = None

    def forward(self, cache: KVCache, step: StepContext) -> Tensor:
        """Run T rows through all layers; returns (T, D) before the final norm."""
        x_TD: Tensor = self.embed(step.token_ids_T)
        if (fault := self.faults.embed_rows) is not None:
            _, x_TD = fault((step.token_ids_T, x_TD))
        step.rotary = self.rotary(step.positions_T)
        step.places = cache.places(step.slots_T)
        step.clock.mark("embed")
        for layer in self.layers:
            x_TD = layer(x_TD, cache, step)
        return x_TD

    def head(self, x_BD: Tensor) -> Tensor:
        """Return the (B, V) fp32 logits of B rows."""
        x_BD = self.norm(x_BD)
        if not self.config.tie_word_embeddings:
            logits_BV: Tensor = self.lm_head(x_BD)
        elif self.tied_head is not None:
            logits_BV = self.tied_head(x_BD)
        else:
            logits_BV = self.ops.linear(x_BD, self.embed.weight)
        return logits_BV.float()

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Turn weights and tables into `dtype`, all but the gates, which stay in fp32."""
        for module in self.modules():
            if isinstance(module, Gate):
                continue
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensor.data = tensor.data.to(dtype)

    def refresh(self) -> None:
        """Make from the weights what the fastest paths read; call it whenever they have changed."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.refresh()
            elif isinstance(module, Experts):
                module.weights.refresh()
        if self.config.tie_word_embeddings and self.ops.prepare_linear is not None:
            # A copy: the embedding reads whole rows, which must stay together in memory.
            self.tied_head = self.ops.prepare_linear(self.embed.weight.detach().clone())


class Layer(nn.Module):
    """Attention, then experts or a dense feed-forward, each behind a norm and added back."""

    def __init__(self, config: ModelConfig, index: int, parts: Parts) -> None:
        super().__init__()
        ops = parts.ops
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.attention = Attention(config, index, ops)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        if config.is_moe:
            self.moe = MoE(config, index, parts)
        else:
            self.mlp = MLP(config.hidden_size, config.intermediate_size, ops)
        self.is_moe = config.is_moe

    def forward(self, x_TD: Tensor, cache: KVCache, step: StepContext) -> Tensor:
        """Return (T, D)."""
        x_TD = x_TD + self.attention(self.attn_norm(x_TD), cache, step)
        normed_TD = self.ffn_norm(x_TD)
        step.clock.mark("attention")
        if self.is_moe:
            moe_TD: Tensor = self.moe(normed_TD, step)
            return x_TD + moe_TD
        y_TD: Tensor = x_TD + self.mlp(normed_TD)
        step.clock.mark("experts")
        return y_TD


class Embedding(nn.Module):
    """The token embedding, (V, D)."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = blank(vocab_size, hidden_size)

    def forward(self, token_ids_T: Tensor) -> Tensor:
        """Return the (T, D) vectors of T tokens."""
        return self.weight.index_select(0, token_ids_T)
