"""The network as it is trained: fp32 parameters, products in bf16, router in fp32.

Parameters carry the names that engine/model uses, so that a trained state needs no translation on
the way to the engine; `export` turns them into Hugging Face names. Evaluation is dropless.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.config import ModelConfig
from engine.train.attention import causal_attention
from engine.train.experts import dropless, with_capacity
from engine.train.tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE

INIT_STD = 0.02

MOE = ModelConfig(
    family="qwen3_moe",
    vocab_size=VOCAB_SIZE,
    hidden_size=256,
    num_layers=4,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
    intermediate_size=512,
    moe_intermediate_size=256,
    num_experts=8,
    top_k=2,
    tie_word_embeddings=True,
    max_position_embeddings=512,
    bos_token_id=BOS_ID,
    eos_token_id=EOS_ID,
    pad_token_id=PAD_ID,
)
"""polyglot-moe: 8.4 M parameters, 3.7 M of them active for one token."""

DRAFT = replace(
    MOE,
    family="qwen3",
    hidden_size=128,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    intermediate_size=384,
    moe_intermediate_size=0,
    num_experts=0,
    top_k=0,
)
"""polyglot-draft: 0.95 M parameters, the same tokenizer."""

MODELS = {"moe": MOE, "draft": DRAFT}


class Routing:
    """What the gate of one layer decided: inputs of the two router losses."""

    def __init__(self, logits_TE: Tensor, ids_TK: Tensor) -> None:
        self.logits_TE = logits_TE
        self.ids_TK = ids_TK


class Network(nn.Module):
    """A decoder-only transformer in training form."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        cos, sin = _rotary_angles(config)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        _initialise(self, seed)

    def forward(
        self, ids_BT: Tensor, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, list[Routing]]:
        """Return logits [B, T, V] in `dtype` and one Routing per MoE layer."""
        hidden = self.embed(ids_BT).to(dtype)
        length = ids_BT.shape[1]
        cos, sin = self.cos[:length].to(dtype), self.sin[:length].to(dtype)
        routings = []
        for layer in self.layers:
            hidden, routing = layer(hidden, cos, sin)
            if routing is not None:
                routings.append(routing)
        return F.linear(self.norm(hidden), self.embed.weight.to(dtype)), routings

    def num_parameters(self) -> tuple[int, int]:
        """Count all parameters, and those active for one token."""
        total = sum(parameter.numel() for parameter in self.parameters())
        experts = sum(
            parameter.numel() for name, parameter in self.named_parameters() if ".experts." in name
        )
        if not self.config.is_moe:
            return total, total
        return total, total - experts + experts * self.config.top_k // self.config.num_experts


class Layer(nn.Module):
    """Attention, then experts (or a dense feed-forward), each on a normalised residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attn_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = Norm(config.hidden_size, config.rms_norm_eps)
        if config.is_moe:
            self.moe = MoE(config)
        else:
            self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Routing | None]:
        """Return the next residual stream [B, T, D], and the Routing if there are experts."""
        x = x + self.attention(self.attn_norm(x), cos, sin)
        normed = self.ffn_norm(x)
        if hasattr(self, "mlp"):
            return x + self.mlp(normed), None
        update, routing = self.moe(normed)
        return x + update, routing


class Norm(nn.Module):
    """RMS norm with its weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Multi-head attention with normalised queries and keys and rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        inner = config.num_heads * config.head_dim
        assert config.num_kv_heads == config.num_heads, "training knows no grouped queries"
        self.qkv = nn.Linear(config.hidden_size, 3 * inner, bias=False)
        self.q_norm = Norm(config.head_dim, config.rms_norm_eps)
        self.k_norm = Norm(config.head_dim, config.rms_norm_eps)
        self.out = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Mix positions causally: [B, T, D] -> [B, T, D]."""
        batch, length, _ = x_BTD.shape
        heads = batch * self.num_heads
        qkv = F.linear(x_BTD, self.qkv.weight.to(x_BTD.dtype))
        q, k, v = qkv.view(batch, length, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        q, k, v = (t.contiguous().view(heads, length, self.head_dim) for t in (q, k, v))
        mixed = causal_attention(q, k, v).view(batch, self.num_heads, length, self.head_dim)
        return F.linear(
            mixed.transpose(1, 2).reshape(batch, length, -1), self.out.weight.to(x_BTD.dtype)
        )


class MoE(nn.Module):
    """Top-k experts: with a fixed capacity while training, dropless in evaluation."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config)
        self.masked_expert: int | None = None
        """An expert the gate may not choose; used by the report to see what it was good for."""

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Routing]:
        """Return the experts' weighted sum [B, T, D] and what the gate decided."""
        x_TD = x_BTD.reshape(-1, x_BTD.shape[-1])
        logits_TE = F.linear(x_TD.float(), self.gate.weight)
        if self.masked_expert is not None:
            logits_TE = logits_TE.clone()
            logits_TE[:, self.masked_expert] = -torch.inf
        weights_TK, ids_TK = logits_TE.softmax(-1).topk(self.top_k, dim=-1)
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        run = with_capacity if self.training else dropless
        gate_up, down = (
            weight.to(x_TD.dtype) for weight in (self.experts.gate_up, self.experts.down)
        )
        y_TD = run(x_TD, ids_TK, weights_TK, gate_up, down)
        return y_TD.view_as(x_BTD), Routing(logits_TE, ids_TK)


class Experts(nn.Module):
    """The weights of one layer's experts, stacked."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        experts, width, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * inner, width))
        self.down = nn.Parameter(torch.empty(experts, width, inner))


class MLP(nn.Module):
    """A dense SwiGLU feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return down(silu(gate(x)) * up(x)), the shape of x."""
        gate, up = F.linear(x, self.gate_up.weight.to(x.dtype)).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down.weight.to(x.dtype))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the two halves of each head against each other by the position's angles."""
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def _rotary_angles(config: ModelConfig) -> tuple[Tensor, Tensor]:
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float64)
    angles = torch.outer(positions, config.rope_theta**-half)
    return angles.cos().float(), angles.sin().float()


def _initialise(network: Network, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    into_residual = INIT_STD / (2 * network.config.num_layers) ** 0.5
    for name, parameter in network.named_parameters():
        if parameter.dim() > 1:
            std = into_residual if ".down" in name or ".out." in name else INIT_STD
            nn.init.normal_(parameter, std=std, generator=generator)
