"""Number formats of one byte: int8 and e4m3, with one fp32 scale a row.

Activations are quantised as they come, one scale a token; weights once, one scale an output
channel. The definition is that of `engine.kernels.gpu.quant`, bit for bit. Called where weights are
loaded and by the quantised paths of the experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import KernelError
from engine.kernels import checks

NATIVE, INT8, E4M3 = 0, 1, 2
"""A block's number format, as it stands in an array of formats. Native is that of the rows."""
SKIP = -1
"""In an array of formats by row, for the paths of a CPU: the row is not run."""
FORMATS = {"int8": INT8, "e4m3": E4M3}
FORMAT_ROWS = 16
"""Rows of one expert, counted from its first, that share a format; the last unit may be short."""
LARGEST = {"int8": 127.0, "e4m3": 448.0}
"""The largest value a format holds (int8 symmetric: -128 is not used)."""
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Scales are never smaller, hence never zero: a row of zeros stays zero without a special case."""
_DTYPES = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class QuantisedWeights:
    """A stack of matrices in one byte a value."""

    values: Tensor
    """(E, O, I) int8 or float8_e4m3fn."""
    scales: Tensor
    """(E, O) fp32: a weight is its value times its output channel's scale."""

    def dequantised(self) -> Tensor:
        """Return the (E, O, I) fp32 weights that the values stand for."""
        return self.values.float() * self.scales.unsqueeze(-1)


@dataclass(frozen=True, slots=True)
class QuantisedExperts:
    """Experts in one byte a weight; values and scales belong together and move together."""

    gate_up: QuantisedWeights
    """(E, 2F, D), gate rows before up rows."""
    down: QuantisedWeights
    """(E, D, F)."""

    def dequantised(self) -> tuple[Tensor, Tensor]:
        """Return the fp32 weights `gate_up` and `down` that the values stand for."""
        return self.gate_up.dequantised(), self.down.dequantised()

    @property
    def format(self) -> str:
        """`int8` or `e4m3`."""
        return "int8" if self.gate_up.values.dtype == torch.int8 else "e4m3"


def quantise_rows(x_RD: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Write each row as values of one byte and one scale: ``x ≈ values * scale``.

    The scale is the row's largest magnitude over the format's largest value, so the row ``[1, -2,
    0.5]`` is ``[64, -127, 32] * 0.01575`` in int8. An int8 value is off by at most half a scale,
    an e4m3 value by at most 1/16 of itself or 2**-10 scales. A row with a NaN or an infinity has
    zeros and a scale that is not finite: what is computed from it is NaN, never a plausible number.

    Args:
        x_RD: (R, D) fp32, bf16 or fp16; R may be 0, D not.
        name: `int8` or `e4m3`.

    Returns:
        values (R, D) and scales (R,) fp32.

    Raises:
        KernelError: `x_RD` is no matrix of floats or has no columns, or there is no such format.
    """
    checks.rank("x_RD", x_RD, "R, D")
    checks.one_of("x_RD", x_RD, checks.FLOATS)
    _check_width("x_RD", x_RD)
    largest = _largest(name)
    wide_RD = x_RD.float()
    scales_R = (wide_RD.abs().amax(-1) / largest).clamp_min(SMALLEST_SCALE)
    scaled_RD = (wide_RD / scales_R.unsqueeze(-1)).nan_to_num(0.0).clamp(-largest, largest)
    if name == "int8":
        scaled_RD = scaled_RD.round()
    scaled_RD = scaled_RD.where(torch.isfinite(scales_R).unsqueeze(-1), 0.0)
    return scaled_RD.to(_DTYPES[name]), scales_R


def quantise_weights(weights_EOI: Tensor, name: str) -> QuantisedWeights:
    """Write a stack of matrices (E, O, I) with one scale for each output channel.

    Raises:
        KernelError: `weights_EOI` is no stack of floats or has no columns, a weight is NaN or
            infinite, or there is no such format.
    """
    checks.rank("weights_EOI", weights_EOI, "E, O, I")
    checks.one_of("weights_EOI", weights_EOI, checks.FLOATS)
    _check_width("weights_EOI", weights_EOI)
    checks.has_values("weights_EOI", weights_EOI)
    checks.finite("weights_EOI", weights_EOI)
    values, scales = quantise_rows(weights_EOI.reshape(-1, weights_EOI.shape[2]), name)
    num_experts, channels, _ = weights_EOI.shape
    return QuantisedWeights(values.view(weights_EOI.shape), scales.view(num_experts, channels))


def quantise_experts(gate_up: Tensor, down: Tensor, name: str) -> QuantisedExperts:
    """Quantise gate_up (E, 2F, D) and down (E, D, F) by output channel.

    Raises:
        KernelError: the two do not fit, a weight is not finite, or there is no such format.
    """
    checks.experts(gate_up, down)
    return QuantisedExperts(quantise_weights(gate_up, name), quantise_weights(down, name))


def _check_width(name: str, x: Tensor) -> None:
    if x.shape[-1] < 1:
        raise KernelError(
            f"{name} is {checks.describe(x)} but its last axis must hold at least one value."
        )


def _largest(name: str) -> float:
    if not isinstance(name, str) or name not in LARGEST:
        raise KernelError(f"format ({name!r}) must be one of {', '.join(LARGEST)}.")
    return LARGEST[name]
