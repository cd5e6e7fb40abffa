"""Expert rows for training: fixed room per expert, so that every product keeps one shape.

A product whose number of rows changes makes the CPU library build a kernel for every new number.
So each expert gets room for C rows, C = 1.5 times its even share; rows beyond are dropped while
training and never in evaluation, which runs `dropless`.

Both directions of both movements are gathers: a token knows its K slots, a slot knows its token.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

CAPACITY_FACTOR = 1.5
CAPACITY_STEP = 64


def capacity(num_slots: int, num_experts: int) -> int:
    """Return C, the rows of room per expert: 16384 slots over 8 experts give 3072."""
    share = CAPACITY_FACTOR * num_slots / num_experts
    return math.ceil(share / CAPACITY_STEP) * CAPACITY_STEP


def with_capacity(
    x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Run the chosen experts with room for C rows each; what does not fit adds nothing.

    gate_up: [E, 2F, D], down: [E, D, F], in the dtype of x. Result: [T, D].
    """
    num_experts = gate_up.shape[0]
    room = capacity(ids_TK.numel(), num_experts)
    slot_TK, fits_TK = assign_slots(ids_TK, num_experts, room)
    weights_TK = (weights_TK * fits_TK).to(x_TD.dtype)
    token_S = _tokens_of(slot_TK, fits_TK, num_experts * room)
    rows = _take(x_TD, token_S, slot_TK, fits_TK).view(num_experts, room, -1)
    gate, up = torch.bmm(rows, gate_up.mT).chunk(2, dim=-1)
    out = torch.bmm(F.silu(gate) * up, down.mT).view(num_experts * room, -1)
    return _combine(out, weights_TK, token_S, slot_TK, fits_TK)


def dropless(
    x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    """Run the chosen experts on every row, one expert after the other; same arguments, no limit."""
    y_TD = torch.zeros_like(x_TD)
    for expert in range(gate_up.shape[0]):
        token, choice = (ids_TK == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        # Padding to few sizes spares a new kernel per size; the padding rows are cut off again.
        rows = F.pad(x_TD[token], (0, 0, 0, -len(token) % CAPACITY_STEP))
        gate, up = F.linear(rows, gate_up[expert]).chunk(2, dim=-1)
        out = F.linear(F.silu(gate) * up, down[expert])[: len(token)]
        y_TD.index_add_(0, token, out * weights_TK[token, choice, None].to(out.dtype))
    return y_TD


def assign_slots(ids_TK: Tensor, num_experts: int, room: int) -> tuple[Tensor, Tensor]:
    """Give every (token, choice) a slot of its expert, first come first served.

    With room 2 and ids [[0], [1], [0], [0]] the slots are [[0], [2], [1], [1]] and the last does
    not fit: a slot that does not fit is the expert's last one and must be ignored.
    Result: slots [T, K] int64 in 0..E*C-1, fits [T, K] bool.
    """
    flat = ids_TK.reshape(-1)
    chosen = F.one_hot(flat, num_experts).to(torch.int32)
    place = (chosen.cumsum(0, dtype=torch.int32) * chosen).sum(1) - 1
    fits = place < room
    slot = flat * room + place.clamp_max(room - 1)
    return slot.view_as(ids_TK), fits.view_as(ids_TK)


def _tokens_of(slot_TK: Tensor, fits_TK: Tensor, num_slots: int) -> Tensor:
    """Invert the slots: token of each slot [E*C]; an empty slot names token 0."""
    num_tokens, top_k = slot_TK.shape
    token_TK = torch.arange(num_tokens).unsqueeze(1).expand(num_tokens, top_k)
    # One place past the end collects what does not fit.
    target = torch.where(fits_TK, slot_TK, num_slots).reshape(-1)
    tokens = torch.zeros(num_slots + 1, dtype=torch.int64)
    return tokens.scatter(0, target, token_TK.reshape(-1))[:num_slots]


class _Take(torch.autograd.Function):
    """Copy each slot's token: [T, D] -> [E*C, D]."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x_TD: Tensor, token_S: Tensor, slot_TK: Tensor, fits_TK: Tensor
    ) -> Tensor:
        ctx.save_for_backward(slot_TK, fits_TK)
        return x_TD.index_select(0, token_S)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        slot_TK, fits_TK = ctx.saved_tensors  # type: ignore[attr-defined]
        parts = grad.index_select(0, slot_TK.reshape(-1)).view(*slot_TK.shape, -1)
        return (parts * fits_TK.unsqueeze(-1)).sum(1), None, None, None


class _Combine(torch.autograd.Function):
    """Weigh and sum each token's slots: [E*C, D] -> [T, D]; weights are 0 where nothing fits."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        out: Tensor,
        weights_TK: Tensor,
        token_S: Tensor,
        slot_TK: Tensor,
        fits_TK: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(out, weights_TK, token_S, slot_TK, fits_TK)
        parts = out.index_select(0, slot_TK.reshape(-1)).view(*slot_TK.shape, -1)
        return (parts * weights_TK.unsqueeze(-1)).sum(1)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        out, weights_TK, token_S, slot_TK, fits_TK = ctx.saved_tensors  # type: ignore[attr-defined]
        num_slots = out.shape[0]
        target = torch.where(fits_TK, slot_TK, num_slots).reshape(-1)
        weight_S = weights_TK.new_zeros(num_slots + 1).scatter(0, target, weights_TK.reshape(-1))
        grad_out = grad.index_select(0, token_S) * weight_S[:num_slots].unsqueeze(1)
        parts = out.index_select(0, slot_TK.reshape(-1)).view(*slot_TK.shape, -1)
        grad_weights = (parts * grad.unsqueeze(1)).sum(-1) * fits_TK
        return grad_out, grad_weights, None, None, None


_take: Callable[..., Tensor] = _Take.apply
_combine: Callable[..., Tensor] = _Combine.apply
