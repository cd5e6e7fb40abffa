"""How numbers are compared: relative to the scale of the reference, so that zero never passes."""

from __future__ import annotations

from torch import Tensor


def max_error(actual: Tensor, reference: Tensor) -> float:
    """Return the largest error, each normalised by max(reference RMS, |reference|)."""
    reference = reference.double()
    scale = reference.pow(2).mean().sqrt().clamp_min(1e-30)
    return float(((actual.double() - reference).abs() / reference.abs().clamp_min(scale)).max())


def rms_error(actual: Tensor, reference: Tensor) -> float:
    """Return the root mean square of the error over that of the reference."""
    reference = reference.double()
    rms = reference.pow(2).mean().sqrt().clamp_min(1e-30)
    return float((actual.double() - reference).pow(2).mean().sqrt() / rms)


def close(actual: Tensor, reference: Tensor, tolerance: float) -> bool:
    """Whether shape, largest and RMS error all fit; an empty pair fits by shape."""
    if actual.shape != reference.shape:
        return False
    if reference.numel() == 0:
        return True
    return (
        max_error(actual, reference) <= tolerance and rms_error(actual, reference) <= tolerance / 2
    )
