"""The draft's forward pass: few rows, few calls, no records.

A draft is asked some hundred times a second for one row, so what counts is the number of calls
around its small products. It has a path of its own: fp32 on a CPU, norms folded into the weights
behind them, keys and values of a sequence in one piece. It need not be bitwise repeatable: what
it proposes decides how fast a text comes, never which. Called by `engine.runtime.draft.drafter`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.cluster.weights import load_model
from engine.config import ModelConfig
from engine.faults import Faults
from engine.kernels.dense import by_columns
from engine.kernels.registry import Target, bind
from engine.model.layers import Rotary
from engine.runtime.draft.single import SingleLayer, SingleRow, single_layer

FEW_ROWS = 3
"""So many rows of one sequence are faster one by one."""
GROWTH = 128
"""Positions by which a sequence's keys and values grow."""


class Memory:
    """Keys and values of one sequence, (L, Hkv, positions, hd) each, for its first tokens."""

    __slots__ = ("arrays", "keys", "length", "values")

    def __init__(self, config: ModelConfig) -> None:
        shape = (config.num_layers, config.num_kv_heads, 0, config.head_dim)
        self.keys, self.values = torch.empty(shape), torch.empty(shape)
        self.arrays = (self.keys.numpy(), self.values.numpy())
        """Both, as numpy sees them."""
        self.length = 0
        """Tokens whose keys and values are held."""

    def make_room(self, length: int) -> None:
        """Let `length` tokens fit."""
        if length > self.keys.shape[2]:
            wider = -(-length // GROWTH) * GROWTH
            for name in ("keys", "values"):
                old = getattr(self, name)
                new = old.new_empty(*old.shape[:2], wider, old.shape[3])
                new[:, :, : self.length] = old[:, :, : self.length]
                setattr(self, name, new)
            self.arrays = (self.keys.numpy(), self.values.numpy())

    def roll_back(self, length: int) -> None:
        """Forget all tokens from position `length` on."""
        self.length = min(self.length, length)


@dataclass(frozen=True, slots=True)
class Feed:
    """The next tokens of one sequence."""

    memory: Memory
    token_ids: Sequence[int]


class _Layer:
    """One layer's weights, norms folded in."""

    def __init__(self, state: dict[str, Tensor], prefix: str, config: ModelConfig) -> None:
        attn_norm, ffn_norm = (
            state[f"{prefix}.attn_norm.weight"],
            state[f"{prefix}.ffn_norm.weight"],
        )
        self.qkv = by_columns(state[f"{prefix}.attention.qkv.weight"] * attn_norm)
        self.out = by_columns(state[f"{prefix}.attention.out.weight"].clone())
        self.gate_up = by_columns(state[f"{prefix}.mlp.gate_up.weight"] * ffn_norm)
        self.down = by_columns(state[f"{prefix}.mlp.down.weight"].clone())
        q_norm, k_norm = (state[f"{prefix}.attention.{name}_norm.weight"] for name in "qk")
        self.qk_norm_Hd = torch.cat(
            (
                (q_norm * config.head_dim**-0.5).expand(config.num_heads, -1),
                k_norm.expand(config.num_kv_heads, -1),
            )
        )

    def single(self, cos_P1d: Tensor, sin_P1d: Tensor) -> SingleLayer:
        """Return the same layer for one row at a time."""
        weights = (self.qkv, self.out, self.gate_up, self.down)
        return single_layer(weights, self.qk_norm_Hd, cos_P1d, sin_P1d)


class DraftNetwork:
    """A dense model in the Qwen3 layout, for one or few rows at a time."""

    def __init__(self, folder: str | Path, config: ModelConfig, num_positions: int) -> None:
        """Load the model of `folder`; sequences have up to `num_positions` tokens.

        Raises:
            CheckpointError: the folder is damaged or does not fit its config.
        """
        self.config, self.num_positions = config, num_positions
        ops = bind(Target(device="cpu", dtype="float32", deterministic=True))
        model = load_model(folder, config, ops, Faults(), num_positions)
        state = {name: parameter.detach() for name, parameter in model.named_parameters()}
        self.embed_VD = state["embed.weight"]
        head_VD = state.get("lm_head.weight", self.embed_VD)
        self.head_VD = by_columns(head_VD * state["norm.weight"])
        self.layers = [
            _Layer(state, f"layers.{index}", config) for index in range(config.num_layers)
        ]
        rotary = Rotary(config.head_dim, config.rope_theta, num_positions)
        self.cos, self.sin = rotary.cos.unsqueeze(1), rotary.sin.unsqueeze(1)
        self.eps = torch.tensor(config.rms_norm_eps)
        self.single = SingleRow(
            self.embed_VD,
            self.head_VD,
            [layer.single(self.cos, self.sin) for layer in self.layers],
            (config.num_heads, config.num_kv_heads),
            config.rms_norm_eps,
        )

    def remember(self) -> Memory:
        """Return the memory of a new sequence."""
        return Memory(self.config)

    def run(self, feeds: Sequence[Feed]) -> Tensor:
        """Take in each sequence's next tokens; returns (B, V) logits after the last of each."""
        if len(feeds) == 1 and len(feeds[0].token_ids) <= FEW_ROWS:
            return self._run_few(feeds[0].memory, feeds[0].token_ids)
        hidden_TD, last_rows = self._hidden(feeds)
        if last_rows is not None:
            hidden_TD = hidden_TD.index_select(0, last_rows)
        return F.linear(self._norm(hidden_TD), self.head_VD)

    def _run_few(self, memory: Memory, token_ids: Sequence[int]) -> Tensor:
        """Take in few tokens one by one; returns (1, V)."""
        memory.make_room(memory.length + len(token_ids))
        for token_id in token_ids:
            x_D = self.single.run(token_id, memory.length, *memory.arrays)
            memory.length += 1
        return torch.from_numpy(self.single.logits(x_D))[None]

    def read(self, token_ids: Sequence[int], count: int) -> Tensor:
        """Read tokens as a text of their own; returns (count, V): what it expected the last to be.

        Row i is what it thought of before `token_ids[i - count]`.
        """
        hidden_TD, _ = self._hidden([Feed(self.remember(), token_ids[:-1])])
        return F.linear(self._norm(hidden_TD[-count:]), self.head_VD)

    def _hidden(self, feeds: Sequence[Feed]) -> tuple[Tensor, Tensor | None]:
        """Return (T, D) of all rows, and which rows are last ones unless all of them are."""
        config = self.config
        counts = [len(feed.token_ids) for feed in feeds]
        ids = torch.tensor([token for feed in feeds for token in feed.token_ids])
        for feed, count in zip(feeds, counts, strict=True):
            feed.memory.make_room(feed.memory.length + count)
        cos, sin = self._angles(feeds, counts)
        x_TD = self.embed_VD.index_select(0, ids)
        num_qk = config.num_heads + config.num_kv_heads
        for index, layer in enumerate(self.layers):
            qkv = F.linear(self._norm(x_TD), layer.qkv).view(len(ids), -1, config.head_dim)
            qk_THd = self._norm(qkv[:, :num_qk]).mul_(layer.qk_norm_Hd)
            turned = qk_THd.roll(config.head_dim // 2, dims=-1)
            qk_THd = torch.addcmul(qk_THd * cos, turned, sin)
            mixed_TD = self._attend(index, qk_THd, qkv[:, num_qk:], feeds, counts)
            x_TD = x_TD + F.linear(mixed_TD, layer.out)
            gate, up = F.linear(self._norm(x_TD), layer.gate_up).chunk(2, dim=-1)
            x_TD = x_TD + F.linear(F.silu(gate).mul_(up), layer.down)
        for feed, count in zip(feeds, counts, strict=True):
            feed.memory.length += count
        if len(ids) == len(feeds):
            return x_TD, None
        return x_TD, torch.tensor(counts).cumsum(0) - 1

    def _angles(self, feeds: Sequence[Feed], counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        if len(feeds) == 1:
            rows = slice(feeds[0].memory.length, feeds[0].memory.length + counts[0])
            return self.cos[rows], self.sin[rows]
        places = torch.tensor(
            [
                place
                for feed, count in zip(feeds, counts, strict=True)
                for place in range(feed.memory.length, feed.memory.length + count)
            ]
        )
        return self.cos.index_select(0, places), self.sin.index_select(0, places)

    def _attend(
        self,
        index: int,
        qk_THd: Tensor,
        v_THd: Tensor,
        feeds: Sequence[Feed],
        counts: Sequence[int],
    ) -> Tensor:
        """Attend each sequence's rows to its memory and put them there; (T, H · hd)."""
        num_heads, parts, row = self.config.num_heads, [], 0
        for feed, count in zip(feeds, counts, strict=True):
            memory, rows = feed.memory, slice(row, row + count)
            start, end = memory.length, memory.length + count
            keys, values = memory.keys[index], memory.values[index]
            keys[:, start:end] = qk_THd[rows, num_heads:].transpose(0, 1)
            values[:, start:end] = v_THd[rows].transpose(0, 1)
            queries = qk_THd[rows, :num_heads].transpose(0, 1)
            parts.append(_attention(queries, keys[:, :end], values[:, :end]))
            row += count
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _norm(self, x: Tensor) -> Tensor:
        """Scale each vector of the last dimension to unit root mean square."""
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * torch.addcmul(self.eps, size, size, value=1.0 / x.shape[-1]).rsqrt_()


def _attention(q_HTd: Tensor, k_GSd: Tensor, v_GSd: Tensor) -> Tensor:
    """Attend T scaled queries, the last ones of S positions; returns (T, H · hd)."""
    num_heads, count, head_dim = q_HTd.shape
    groups, length, _ = k_GSd.shape
    q_GRd = q_HTd.reshape(groups, -1, head_dim)
    scores = torch.bmm(q_GRd, k_GSd.transpose(1, 2))
    if count > 1:
        future = torch.ones(count, length, dtype=torch.bool).triu_(length - count + 1)
        scores.view(num_heads, count, length).masked_fill_(future, -torch.inf)
    mixed = torch.bmm(scores.softmax(-1), v_GSd).view(num_heads, count, head_dim)
    return mixed.transpose(0, 1).reshape(count, -1)
