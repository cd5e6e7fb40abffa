"""The plain products and norms around the experts, as torch runs them fastest."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def linear(x_TD: Tensor, weight_OD: Tensor) -> Tensor:
    """Return ``x @ weight.T``: (T, D) and (O, D) give (T, O)."""
    return F.linear(x_TD, weight_OD)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Scale each vector of the last dimension to unit root mean square, then by `weight_D`."""
    return F.rms_norm(x, weight_D.shape, weight_D, eps)
