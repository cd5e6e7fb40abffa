"""The small layers around attention and experts.

Parameters are born as NaN: what loading forgets cannot pass for a number.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.kernels.dense import Product
from engine.kernels.registry import Ops


def blank(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """Make a parameter full of NaN, to be filled from a checkpoint."""
    return nn.Parameter(torch.full(shape, torch.nan, dtype=dtype), requires_grad=False)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension.

    Source: arXiv 1910.07467.
    """

    def __init__(self, width: int, eps: float, ops: Ops) -> None:
        super().__init__()
        self.weight, self.eps, self.ops = blank(width), eps, ops

    def forward(self, x: Tensor) -> Tensor:
        """Norm (…, width) vectors."""
        out: Tensor = self.ops.rms_norm(x, self.weight, self.eps)
        return out


class Linear(nn.Module):
    """A product without bias: (T, D) to (T, O)."""

    def __init__(self, width_in: int, width_out: int, ops: Ops) -> None:
        super().__init__()
        self.weight, self.ops = blank(width_out, width_in), ops
        self.product: Product | None = None

    def refresh(self) -> None:
        """Make the product that is fastest while the weight stays as it is."""
        if self.ops.prepare_linear is not None:
            self.product = self.ops.prepare_linear(self.weight)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Multiply by the transposed weight."""
        if self.product is not None:
            return self.product(x_TD)
        out: Tensor = self.ops.linear(x_TD, self.weight)
        return out


class MLP(nn.Module):
    """The feed-forward layer of a dense model: SwiGLU.

    Source: arXiv 2002.05202.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, ops: Ops) -> None:
        super().__init__()
        self.gate_up = Linear(hidden_size, 2 * intermediate_size, ops)
        self.down = Linear(intermediate_size, hidden_size, ops)
        self.ops = ops

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return (T, D)."""
        out: Tensor = self.ops.mlp(x_TD, self.gate_up.weight, self.down.weight)
        return out


class Rotary(nn.Module):
    """Tables of the rotary position embedding.

    Source: RoFormer (arXiv 2104.09864), in the half-split layout of the Hugging Face checkpoints.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, theta: float, num_positions: int) -> None:
        super().__init__()
        frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
        angles = torch.arange(num_positions).float()[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        self.register_buffer("cos", torch.cat((cos, cos), dim=1), persistent=False)
        self.register_buffer("sin", torch.cat((-sin, sin), dim=1), persistent=False)

    def forward(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin (T, 1, hd) of T positions; the first half of sin is negated."""
        rows = (table.index_select(0, positions_T).unsqueeze(1) for table in (self.cos, self.sin))
        cos, sin = rows
        return cos, sin
