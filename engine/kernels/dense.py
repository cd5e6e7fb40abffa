"""The plain products and norms around the experts, as torch runs them fastest."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import onednn

Product = Callable[[Tensor], Tensor]
"""Multiplies (T, D) rows by a weight it holds; (T, O)."""


def linear(x_TD: Tensor, weight_OD: Tensor) -> Tensor:
    """Return ``x @ weight.T``: (T, D) and (O, D) give (T, O)."""
    return F.linear(x_TD, weight_OD)


def columns_product(weight_OD: Tensor) -> Product:
    """Lay a weight out by columns in memory and return its product; shape and values stay.

    The library's product of few fp32 rows is up to twice as fast this way round.
    """
    weight_OD.data = by_columns(weight_OD.data)
    return lambda x_TD: F.linear(x_TD, weight_OD)


def packed_product(weight_OD: Tensor) -> Product:
    """Copy a weight into oneDNN's blocked layout and return its product."""
    packed = onednn.pack(weight_OD.data)

    def product(x_TD: Tensor) -> Tensor:
        num_rows = x_TD.shape[0]
        if num_rows == 0:
            return x_TD.new_empty(0, weight_OD.shape[0])
        size = onednn.size_class(num_rows)
        if size > num_rows:
            x_TD = F.pad(x_TD, (0, 0, 0, size - num_rows))
        return onednn.linear(x_TD.contiguous(), packed)[:num_rows]

    return product


def by_columns(matrices: Tensor) -> Tensor:
    """Return equal (…, O, I) matrices whose columns are contiguous in memory."""
    return matrices.transpose(-1, -2).contiguous().transpose(-1, -2)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Scale each vector of the last dimension to unit root mean square, then by `weight_D`.

    In fp32 whatever the format; five operations where torch's own takes eight.
    """
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    square = torch.addcmul(_constant(eps, x.device), size, size, value=1.0 / x.shape[-1])
    normed: Tensor = (x * square.rsqrt_()).mul_(weight_D)
    return normed if x.dtype == torch.float32 else normed.to(x.dtype)


@cache
def _constant(value: float, device: torch.device) -> Tensor:
    """Return a number as a tensor, made once: to wrap it at every call costs as much as its use."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=torch.float32, device=device)


def norm_and_rotate(
    qk_THd: Tensor,
    num_queries: int,
    q_weight_d: Tensor,
    k_weight_d: Tensor,
    eps: float,
    rotary: tuple[Tensor, Tensor],
) -> Tensor:
    """Norm each head's query or key and rotate it by its position's angles.

    Args:
        qk_THd: (T, H + Hkv, hd), queries before keys.
        num_queries: H.
        q_weight_d: (hd,) of the queries' norm.
        k_weight_d: (hd,) of the keys'.
        eps: of both.
        rotary: cos (T, 1, hd) and sin (T, 1, hd), the first half of sin negated.

    Returns:
        (T, H + Hkv, hd).

    Source: RoFormer (arXiv 2104.09864), in the half-split layout of the Hugging Face checkpoints.
    """
    cos, sin = rotary
    weight_Hd = torch.cat(
        (
            q_weight_d.expand(num_queries, -1),
            k_weight_d.expand(qk_THd.shape[1] - num_queries, -1),
        )
    )
    x_THd = rms_norm(qk_THd, weight_Hd, eps)
    return torch.addcmul(x_THd * cos, x_THd.roll(x_THd.shape[-1] // 2, dims=-1), sin)
