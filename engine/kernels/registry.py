"""Pick, once per engine, how each operation runs, and say why.

Every operation has several implementations; the first that supports the target is taken. The answer
carries the reason, which `workbench doctor` and the trace show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.kernels import attention, combine, dense, grouped_gemm, permute, tiled, topk


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What an engine runs on."""

    device: str
    """`cpu` or `cuda`."""
    dtype: str
    deterministic: bool


@dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation of one operation."""

    op: str
    name: str
    fn: Callable[..., Any]
    refuses: Callable[[Target], str | None]
    """Says why it does not serve a target, or None when it does."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The implementation taken for an operation, and why."""

    op: str
    name: str
    fn: Callable[..., Any]
    reason: str


@dataclass(frozen=True, slots=True)
class Ops:
    """The operations of one engine, bound once."""

    linear: Callable[..., Any]
    rms_norm: Callable[..., Any]
    attention: Callable[..., Any]
    topk: Callable[..., Any]
    permute: Callable[..., Any]
    grouped_mlp: Callable[..., Any]
    mlp: Callable[..., Any]
    combine: Callable[..., Any]
    reasons: tuple[Choice, ...]


def bind(target: Target) -> Ops:
    """Choose an implementation of every operation for `target`."""
    choices = [choose(op, target) for op in OPERATIONS]
    chosen: dict[str, Any] = {choice.op: choice.fn for choice in choices}
    return Ops(**chosen, reasons=tuple(choices))


def choose(op: str, target: Target) -> Choice:
    """Take the first implementation of `op` that serves `target`, and name those passed over."""
    passed_over: list[str] = []
    for kernel in _KERNELS:
        if kernel.op != op:
            continue
        refusal = kernel.refuses(target)
        if refusal is None:
            why = "; ".join(passed_over) or "first choice"
            return Choice(op, kernel.name, kernel.fn, why)
        passed_over.append(f"{kernel.name} passed over: {refusal}")
    raise AssertionError(f"no implementation of {op} serves {target}")


def kernels() -> tuple[Kernel, ...]:
    """Return every registered implementation, in order of preference."""
    return _KERNELS


def _when_deterministic(target: Target) -> str | None:
    return None if target.deterministic else "costs several times more; deterministic mode is off"


def _unless_deterministic(target: Target) -> str | None:
    return "bits depend on the batch; deterministic mode is on" if target.deterministic else None


def _always(_: Target) -> str | None:
    return None


OPERATIONS = (
    "linear",
    "rms_norm",
    "attention",
    "topk",
    "permute",
    "grouped_mlp",
    "mlp",
    "combine",
)

_KERNELS = (
    Kernel("linear", "torch", dense.linear, _unless_deterministic),
    Kernel("linear", "tiled", tiled.linear, _when_deterministic),
    Kernel("rms_norm", "torch", dense.rms_norm, _unless_deterministic),
    Kernel("rms_norm", "tiled", tiled.rms_norm, _when_deterministic),
    Kernel("attention", "torch", attention.paged_attention, _unless_deterministic),
    Kernel("attention", "tiled", tiled.paged_attention, _when_deterministic),
    Kernel("topk", "torch", topk.route, _unless_deterministic),
    Kernel("topk", "tiled", tiled.topk, _when_deterministic),
    Kernel("permute", "torch", permute.permute, _always),
    Kernel("grouped_mlp", "torch", grouped_gemm.grouped_mlp, _unless_deterministic),
    Kernel("grouped_mlp", "tiled", tiled.grouped_mlp, _when_deterministic),
    Kernel("mlp", "torch", grouped_gemm.mlp, _unless_deterministic),
    Kernel("mlp", "tiled", tiled.mlp, _when_deterministic),
    Kernel("combine", "torch", combine.combine, _always),
)
