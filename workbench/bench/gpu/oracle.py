"""The layer in fp64, expert by expert, and how far a result is from it.

Written apart from the kernels and from their torch twins; no step is shared.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.bench.gpu.inputs import Batch


def moe(batch: Batch, gate_up: Tensor, down: Tensor) -> Tensor:
    """Return (T, D) fp64: each token's weighted sum over its experts; -1 adds nothing."""
    y_TD = torch.zeros(batch.x_TD.shape, dtype=torch.float64, device=batch.x_TD.device)
    width = down.shape[2]
    for expert in torch.unique(batch.ids_TK).tolist():
        if expert < 0:
            continue
        tokens, slots = torch.nonzero(batch.ids_TK == expert, as_tuple=True)
        both = batch.x_TD[tokens].double() @ gate_up[expert].double().T
        gate, up = both[:, :width], both[:, width:]
        out = (gate / (1 + torch.exp(-gate)) * up) @ down[expert].double().T
        y_TD.index_add_(0, tokens, out * batch.weights_TK[tokens, slots, None].double())
    return y_TD


def errors(actual: Tensor, reference: Tensor) -> tuple[float, float]:
    """Return the largest and the RMS error on the reference's own scale; NaN gives infinity.

    The largest: each error over max(RMS of the reference, |reference|). An empty pair has none.
    """
    if actual.shape != reference.shape or not bool(torch.isfinite(actual).all()):
        return float("inf"), float("inf")
    if reference.numel() == 0:
        return 0.0, 0.0
    wrong, wide = (actual.double() - reference).abs(), reference.abs().double()
    rms = wide.pow(2).mean().sqrt().clamp_min(1e-30)
    largest = (wrong / wide.clamp_min(rms)).max()
    return float(largest), float(wrong.pow(2).mean().sqrt() / rms)
