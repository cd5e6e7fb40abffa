"""Run text through an engine and look at every MoE layer from outside.

Hooks on the modules see what goes in and comes out; the engine does not know. A `Pass` is all that
one run over the windows showed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine import Engine
from engine.events import UnitEvent
from engine.kernels.quant import INT8
from engine.model.moe import Experts, MoE
from engine.routing.precision.features import margins_of, ranges_of

Float = npt.NDArray[np.float32]


@dataclass(slots=True)
class Seen:
    """One MoE layer over all T tokens of a run."""

    hidden: list[Tensor] = field(default_factory=list)
    """(T, D) in all: what the layer, with attention and residual, put out."""
    errors: list[Float] = field(default_factory=list)
    """(T,) in all: how far the worst of a token's experts is off in INT8, relative."""
    margins: list[Float] = field(default_factory=list)
    ranges: list[Float] = field(default_factory=list)
    units: list[UnitEvent] = field(default_factory=list)


@dataclass(slots=True)
class Pass:
    """One run over some windows."""

    layers: list[Seen]
    nll: Float
    """(N,) nats of every next token."""

    @property
    def perplexity(self) -> float:
        """Exp of the mean nats."""
        return float(np.exp(self.nll.mean(dtype=np.float64)))

    @property
    def int8_share(self) -> float:
        """Of all units in all layers, those that ran in INT8 and were not run again."""
        units = [unit for layer in self.layers for unit in layer.units]
        total = sum(unit.units for unit in units)
        kept = sum(unit.int8_units - unit.failed_units for unit in units)
        return kept / total if total else 0.0

    def total(self, name: str) -> int:
        """Return a number of `UnitEvent` summed over layers and steps."""
        return sum(getattr(unit, name) for layer in self.layers for unit in layer.units)


def run(
    engine: Engine, windows: Iterable[list[int]], *, errors: bool = False, hidden: bool = False
) -> Pass:
    """Run each window alone, as a prompt.

    Args:
        engine: with one process.
        windows: token ids; the last one of each is only predicted.
        errors: whether to run every layer's experts in INT8 beside, to compare; needs an engine
            that holds both formats and runs in its own.
        hidden: whether to keep what the layers put out.
    """
    moes = [module for module in engine.transformer.modules() if isinstance(module, MoE)]
    seen = [Seen() for _ in moes]
    nll = []
    with _hooks(engine, seen, errors=errors, hidden=hidden):
        for ids in windows:
            logits_TV = engine.logits(ids[:-1])
            nll.append(nats(logits_TV, ids[1:]))
    return Pass(seen, np.concatenate(nll))


def nats(logits_TV: Float, targets: list[int]) -> Float:
    """Return (T,) minus the log of the probability of each target."""
    logits = torch.from_numpy(np.asarray(logits_TV))
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(targets), reduction="none")
    return np.asarray(loss.numpy())


@contextmanager
def _hooks(engine: Engine, seen: list[Seen], *, errors: bool, hidden: bool) -> Iterator[None]:
    handles: list[Any] = []
    layers = [layer for layer in engine.transformer.layers if layer.is_moe]
    for place, layer in enumerate(layers):
        assert isinstance(layer.moe, MoE)
        handles.append(layer.moe.register_forward_hook(_see_moe(seen[place])))
        if errors:
            handles.append(
                layer.moe.experts.register_forward_hook(
                    _see_experts(seen[place], layer.moe.gate.router.top_k)
                )
            )
        if hidden:
            handles.append(
                layer.register_forward_hook(
                    lambda _m, _a, out, at=seen[place]: at.hidden.append(out.float().clone())
                )
            )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _see_moe(seen: Seen) -> Any:
    def hook(moe: MoE, args: tuple[Any, ...], _: Tensor) -> None:
        x_TD, step = args
        seen.margins.append(margins_of(moe.gate.logits(x_TD), moe.gate.router.top_k))
        seen.ranges.append(ranges_of(x_TD))
        if step.precision is not None:
            seen.units.append(step.precision.layers[-1])

    return hook


def _see_experts(seen: Seen, top_k: int) -> Any:
    def hook(experts: Experts, args: tuple[Any, ...], out_RD: Tensor) -> None:
        rows_RD, handle = args[:2]
        formats_R = torch.full((len(rows_RD),), INT8, dtype=torch.int8)
        int8_RD = experts.ops.grouped_mlp(
            rows_RD, handle.counts, handle.experts, experts.weights, formats_R
        )
        errors_R = relative(int8_RD, out_RD).numpy()
        errors_N = np.append(errors_R, np.float32(0))[handle.row_of_N.numpy()]
        seen.errors.append(errors_N.reshape(-1, top_k).max(axis=1))

    return hook


def relative(other_RD: Tensor, exact_RD: Tensor) -> Tensor:
    """Return (R,) the distance of each row, relative to the exact row's length."""
    exact = exact_RD.float()
    tiny = torch.finfo(torch.float32).tiny
    lengths_R = exact.norm(dim=-1).clamp_min(tiny)
    errors_R: Tensor = (other_RD.float() - exact).norm(dim=-1) / lengths_R
    return errors_R
