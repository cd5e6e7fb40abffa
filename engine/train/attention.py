"""Causal attention for training, as one operator with its own backward pass.

`torch.compile` cannot look inside a custom operator, which is the point: compiling hand-written
bf16 attention on a CPU was seen to give NaN gradients for the keys. Waits for the whole score
matrix; contexts are short here (at most 512).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Saved = tuple[Tensor, Tensor, Tensor, Tensor]


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend from every position to itself and those before it.

    query, key, value: [batch * heads, T, head_dim], contiguous, one dtype. Result: the same shape.
    """
    mixed: Tensor = _attend(query, key, value)[0]
    return mixed


@torch.library.custom_op("tokenrouter::causal_attention", mutates_args=())
def _attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    length = query.shape[1]
    future = torch.full((length, length), -torch.inf, dtype=query.dtype).triu_(1)
    scores = torch.baddbmm(future, query, key.mT, alpha=1 / math.sqrt(query.shape[2]))
    weights = torch.softmax(scores, dim=-1)
    return torch.bmm(weights, value), weights


@_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[0], query.shape[1], query.shape[1])


@torch.library.custom_op("tokenrouter::causal_attention_backward", mutates_args=())
def _attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    grad_weights = torch.bmm(grad, value.mT)
    grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
    grad_scores.mul_(1 / math.sqrt(query.shape[2]))
    grad_query = torch.bmm(grad_scores, key)
    grad_key = torch.bmm(grad_scores.mT, query)
    return grad_query, grad_key, torch.bmm(weights.mT, grad)


@_attend_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(
    ctx: torch.autograd.function.FunctionCtx,
    inputs: tuple[Tensor, ...],
    output: tuple[Tensor, Tensor],
) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _backward(
    ctx: torch.autograd.function.FunctionCtx, grad: Tensor, _: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    saved: Saved = ctx.saved_tensors  # type: ignore[attr-defined]
    grads: tuple[Tensor, Tensor, Tensor] = _attend_backward(grad.contiguous(), *saved)
    return grads


_attend.register_autograd(_backward, setup_context=_save)
