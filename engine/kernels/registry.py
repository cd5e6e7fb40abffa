"""Pick, once per engine, how each operation runs, and say why.

Every operation has several implementations; the first that serves the target is taken. The answer
carries the reason, which `workbench kernels` shows. Triton is imported only when one of its kernels
is taken, so a machine without it loses nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from engine.errors import MachineError
from engine.kernels import (
    attention,
    combine,
    cpu_experts,
    cpu_mixed,
    dense,
    grouped_gemm,
    onednn,
    permute,
    tiled,
    topk,
    trials,
)
from engine.kernels.experts import Prepare

SMALL_MATRIX = 2 << 20
"""Up to this many bytes an fp32 expert's matrix runs fastest by columns, above it packed."""
SHOWN = ((512, 256), (1024, 1024))
"""Experts' matrices for which the table says what was measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What an engine runs on."""

    device: str
    """`cpu` or `cuda`."""
    dtype: str
    deterministic: bool
    scheme: str = "native"
    """`native`: experts in `dtype`; `w8a8`: int8 weights and rows; `mixed`: either, row by row."""
    expert_bytes: int = 0
    """Size of one expert's larger matrix in `dtype`."""
    measure: bool = False
    """Whether the experts may try out, when their weights are prepared, what is fastest here."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation of one operation."""

    op: str
    name: str
    fn: Callable[..., Any] | str
    """The function, or ``module:function`` where importing it needs Triton."""
    refuses: Callable[[Target], str | None]
    """Says why it does not serve a target, or None when it does."""
    dtypes: str = "any"
    sizes: str = "any"
    """In words, where the choice depends on sizes."""
    prepare: Callable[..., Any] | None = None
    """Makes from the weights, once, what the function reads instead of them."""
    measures: bool = False
    """Whether `prepare` takes `measure`."""

    def load(self) -> Callable[..., Any]:
        """Return the function."""
        if isinstance(self.fn, str):
            module, name = self.fn.split(":")
            loaded: Callable[..., Any] = getattr(import_module(module), name)
            return loaded
        return self.fn


@dataclass(frozen=True, slots=True)
class Choice:
    """The implementation taken for an operation, and why."""

    op: str
    name: str
    fn: Callable[..., Any]
    reason: str
    prepare: Callable[..., Any] | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One implementation in the table that people read."""

    op: str
    name: str
    device: str
    dtypes: str
    rows: str
    """The sizes it is for."""
    taken: bool
    reason: str
    """Why it is taken, or why it was passed over."""


@dataclass(frozen=True, slots=True)
class Ops:
    """The operations of one engine on a CPU, bound once."""

    linear: Callable[..., Any]
    rms_norm: Callable[..., Any]
    norm_and_rotate: Callable[..., Any]
    attention: Callable[..., Any]
    topk: Callable[..., Any]
    permute: Callable[..., Any]
    grouped_mlp: Callable[..., Any]
    mlp: Callable[..., Any]
    combine: Callable[..., Any]
    prepare_linear: Callable[[Any], dense.Product] | None
    """Makes the product of a weight that stays as it is; None where `linear` is all there is."""
    prepare_experts: Prepare | None
    """For `ExpertWeights`."""
    reasons: tuple[Choice, ...]


def bind(target: Target) -> Ops:
    """Choose an implementation of every operation for `target`.

    Raises:
        MachineError: this machine can run an operation in no way that serves the target.
    """
    choices = {op: choose(op, target) for op in OPERATIONS}
    chosen: dict[str, Any] = {op: choice.fn for op, choice in choices.items()}
    return Ops(
        **chosen,
        prepare_linear=choices["linear"].prepare,
        prepare_experts=choices["grouped_mlp"].prepare,
        reasons=tuple(choices.values()),
    )


def choose(op: str, target: Target) -> Choice:
    """Take the first implementation of `op` that serves `target`, and name those passed over.

    Raises:
        MachineError: none does.
    """
    passed_over: list[str] = []
    for kernel in _KERNELS:
        if kernel.op != op:
            continue
        refusal = kernel.refuses(target)
        if refusal is None:
            why, prepare = "; ".join(passed_over) or "first choice", kernel.prepare
            if kernel.measures and target.measure and prepare is not None:
                prepare = partial(prepare, measure=True)
            return Choice(op, kernel.name, kernel.load(), why, prepare)
        passed_over.append(f"{kernel.name} passed over: {refusal}")
    raise MachineError(f"no implementation of {op} runs here: {'; '.join(passed_over)}.")


def table(target: Target) -> list[Row]:
    """Return every implementation with whether `target` takes it, and why or why not.

    Where the choice depends on sizes and the target names none, one is taken for each.
    """
    targets = [target]
    if not target.expert_bytes:
        targets.append(replace(target, expert_bytes=SMALL_MATRIX + 1))
    rows = []
    for op in OPERATIONS:
        names = [name for one in targets if (name := _first(op, one))]
        for kernel in (kernel for kernel in _KERNELS if kernel.op == op):
            refusals = [kernel.refuses(one) for one in targets]
            taken = kernel.name in names
            if taken:
                reason = "first that serves" if kernel.sizes == "any" else f"for {kernel.sizes}"
                if kernel.measures and target.measure:
                    reason += "".join(f"; {found}" for found in _measured(target))
            else:
                reason = next(filter(None, refusals), f"{names[0]} comes first" if names else "")
            rows.append(
                Row(op, kernel.name, target.device, kernel.dtypes, kernel.sizes, taken, reason)
            )
    return rows


def kernels() -> tuple[Kernel, ...]:
    """Return every registered implementation, in order of preference."""
    return _KERNELS


def _first(op: str, target: Target) -> str | None:
    """Return the name of the implementation that `choose` would take, importing nothing."""
    for kernel in _KERNELS:
        if kernel.op == op and kernel.refuses(target) is None:
            return kernel.name
    return None


def _measured(target: Target) -> list[str]:
    """Say which way is taken for matrices of some sizes, and by what measurement."""
    kind = "int8" if target.scheme == "w8a8" else target.dtype
    found = []
    for out, inner in SHOWN:
        plan = trials.plan(kind, out, inner)
        found.append(f"{out} x {inner}: {trials.words(plan)}, {plan.reason}")
    return found


def _when_deterministic(target: Target) -> str | None:
    if not target.deterministic:
        return "costs several times more; deterministic mode is off"
    return _cpu_only(target)


def _unless_deterministic(target: Target) -> str | None:
    return "bits depend on the batch; deterministic mode is on" if target.deterministic else None


def _cpu_only(target: Target) -> str | None:
    return None if target.device == "cpu" else f"runs on a CPU, not on {target.device}"


def _always(_: Target) -> str | None:
    return None


def _triton(target: Target) -> str | None:
    if target.device == "cpu":
        return "is for GPUs; on a CPU only its interpreter runs it, for tests"
    if find_spec("triton") is None:
        return "triton is not installed"
    return _unless_deterministic(target)


def _columns(target: Target) -> str | None:
    if target.dtype != "float32":
        return f"is faster in fp32 only, not in {target.dtype}"
    return _cpu_only(target) or _unless_deterministic(target)


def _packed(target: Target) -> str | None:
    return _cpu_only(target) or _unless_deterministic(target) or onednn.missing(target.dtype)


def _native(target: Target) -> str | None:
    if target.scheme != "native":
        return f"runs weights in their own format; {target.scheme} is asked for"
    return None


def _columns_experts(target: Target) -> str | None:
    if target.expert_bytes > SMALL_MATRIX:
        return f"packed is faster for matrices above {SMALL_MATRIX >> 20} MB"
    return _native(target) or _columns(target)


def _packed_experts(target: Target) -> str | None:
    return _native(target) or _packed(target)


def _int8_experts(target: Target) -> str | None:
    if target.scheme != "w8a8":
        return "changes the numbers; only when int8 experts are asked for"
    return _packed(target)


def _mixed_experts(target: Target) -> str | None:
    if target.scheme != "mixed":
        return "holds each expert twice; only when formats are chosen by unit"
    return _packed(target)


def _plain_experts(target: Target) -> str | None:
    return _native(target) or _unless_deterministic(target)


def _tiled_experts(target: Target) -> str | None:
    return _native(target) or _when_deterministic(target)


OPERATIONS = (
    "linear",
    "rms_norm",
    "norm_and_rotate",
    "attention",
    "topk",
    "permute",
    "grouped_mlp",
    "mlp",
    "combine",
)

_GPU = "engine.kernels.gpu."
_SMALL = f"matrices up to {SMALL_MATRIX >> 20} MB"
_LARGE = (
    f"fp32 matrices above {SMALL_MATRIX >> 20} MB and all bf16 ones; few rows take another way, "
    "measured or by rule"
)

_KERNELS = (
    Kernel("linear", "columns", dense.linear, _columns, "fp32", prepare=dense.columns_product),
    Kernel("linear", "packed", dense.linear, _packed, "bf16", prepare=dense.packed_product),
    Kernel("linear", "torch", dense.linear, _unless_deterministic),
    Kernel("linear", "tiled", tiled.linear, _when_deterministic, "fp32"),
    Kernel("rms_norm", "torch", dense.rms_norm, _unless_deterministic),
    Kernel("rms_norm", "tiled", tiled.rms_norm, _when_deterministic, "fp32"),
    Kernel("norm_and_rotate", "torch", dense.norm_and_rotate, _unless_deterministic),
    Kernel("norm_and_rotate", "tiled", tiled.norm_and_rotate, _when_deterministic, "fp32"),
    Kernel("attention", "torch", attention.paged_attention, _unless_deterministic),
    Kernel("attention", "tiled", tiled.paged_attention, _when_deterministic, "fp32"),
    Kernel("topk", "triton", _GPU + "topk:route", _triton, "fp32 logits"),
    Kernel("topk", "torch", topk.route, _unless_deterministic, "fp32 logits"),
    Kernel("topk", "tiled", tiled.topk, _when_deterministic, "fp32"),
    Kernel("permute", "triton", _GPU + "permute:permute", _triton, "integers"),
    Kernel("permute", "host", permute.permute, _always, "integers"),
    Kernel("grouped_mlp", "triton", _GPU + "grouped_gemm:grouped_mlp", _triton,
           "fp32 bf16 fp16 int8 fp8"),
    Kernel("grouped_mlp", "int8", cpu_experts.int8_mlp, _int8_experts, "int8",
           prepare=cpu_experts.prepare_int8, measures=True),
    Kernel("grouped_mlp", "columns", cpu_experts.columns_mlp, _columns_experts, "fp32", _SMALL,
           cpu_experts.prepare_columns),
    Kernel("grouped_mlp", "packed", cpu_experts.packed_mlp, _packed_experts, "fp32 bf16", _LARGE,
           cpu_experts.prepare_packed, measures=True),
    Kernel("grouped_mlp", "torch", grouped_gemm.grouped_mlp, _plain_experts),
    Kernel("grouped_mlp", "tiled", tiled.grouped_mlp, _tiled_experts, "fp32"),
    Kernel("grouped_mlp", "mixed", cpu_mixed.mixed_mlp, _mixed_experts, "fp32 bf16 with int8",
           prepare=cpu_mixed.prepare_mixed),
    Kernel("mlp", "torch", grouped_gemm.mlp, _unless_deterministic),
    Kernel("mlp", "tiled", tiled.mlp, _when_deterministic, "fp32"),
    Kernel("combine", "triton", _GPU + "combine:combine", _triton),
    Kernel("combine", "torch", combine.combine, _always),
)  # fmt: skip
