"""Refuse arguments that do not fit: one sentence with the argument, what it is and what is needed.

Shapes, formats and devices are checked at every call and cost no wait for the device. What needs
the values (`ids_in_range`, `finite`) waits for them, so it belongs where weights are loaded and on
paths that run on the host anyway. Called by the operations in this package.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.errors import KernelError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32)


def describe(tensor: Tensor) -> str:
    """Return shape and format for a message: ``(5, 32) bfloat16``."""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def tensor(name: str, value: Any) -> None:
    """Require a tensor, and a dense one."""
    if not isinstance(value, Tensor):
        raise KernelError(f"{name} is of type {type(value).__name__} but must be a torch tensor.")
    if value.layout is not torch.strided:
        raise KernelError(
            f"{name} {describe(value)} has the layout {value.layout} but must be dense; call "
            f".to_dense() first."
        )


def has_values(name: str, tensor: Tensor) -> None:
    """Require a tensor that lies somewhere, not on `meta`."""
    if tensor.is_meta:
        raise KernelError(
            f"{name} {describe(tensor)} lies on meta, where nothing has values; move it to a "
            f"device first."
        )


def no_gradient(**tensors: Tensor) -> None:
    """Require that nobody waits for a gradient, where a kernel computes none."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor.requires_grad:
            raise KernelError(
                f"{name} {describe(tensor)} requires a gradient but this kernel computes none; "
                f"call it under torch.no_grad()."
            )


def rank(name: str, value: Tensor, axes: str) -> None:
    """Require a dense tensor with as many dimensions as `axes`, such as ``T, D``, names."""
    tensor(name, value)
    if value.dim() != len(axes.split(",")):
        raise KernelError(f"{name} is {describe(value)} but must have the axes ({axes}).")


def one_of(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    """Require one of these formats."""
    if tensor.dtype not in dtypes:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise KernelError(f"{name} is {describe(tensor)} but must be one of {allowed}.")


def shape(name: str, tensor: Tensor, wanted: tuple[int, ...], because: str) -> None:
    """Require exactly this shape; `because` names what it has to fit."""
    if tuple(tensor.shape) != wanted:
        raise KernelError(f"{name} is {describe(tensor)} but must be {wanted} to fit {because}.")


def memory(
    name: str, tensor: Tensor, size: tuple[int, ...], dtype: torch.dtype, because: str
) -> None:
    """Require what a kernel addresses unseen: exactly this shape and format, without gaps."""
    if tuple(tensor.shape) != size or tensor.dtype != dtype:
        wanted = f"{size} {str(dtype).removeprefix('torch.')}"
        raise KernelError(f"{name} is {describe(tensor)} but must be {wanted} to fit {because}.")
    contiguous(name, tensor)


def at_least(name: str, value: int, least: int) -> None:
    """Require a count of `least` or more."""
    if value < least:
        raise KernelError(f"{name} ({value}) must be {least} or more.")


def same_device(**tensors: Tensor | None) -> None:
    """Require that all of these lie on one device."""
    there = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(there.values())) > 1:
        places = ", ".join(f"{name} on {device}" for name, device in there.items())
        raise KernelError(f"all arguments must lie on one device, but here: {places}.")


def contiguous_rows(name: str, tensor: Tensor) -> None:
    """Require that neighbours in the last dimension are neighbours in memory."""
    if tensor.shape[-1] > 1 and tensor.numel() and tensor.stride(-1) != 1:
        raise KernelError(
            f"{name} {describe(tensor)} has stride {tensor.stride(-1)} in its last dimension but "
            f"needs 1; call .contiguous() first."
        )


def contiguous(name: str, tensor: Tensor) -> None:
    """Require a tensor without gaps."""
    if not tensor.is_contiguous():
        raise KernelError(
            f"{name} {describe(tensor)} has strides {tensor.stride()} but must be contiguous; "
            f"call .contiguous() first."
        )


def ids_matrix(name: str, ids_TK: Tensor) -> None:
    """Require (T, K) integers with K of at least 1."""
    rank(name, ids_TK, "T, K")
    one_of(name, ids_TK, _INTEGERS)
    if ids_TK.shape[1] < 1:
        raise KernelError(f"{name} is {describe(ids_TK)} but K must be at least 1.")


def ids_in_range(name: str, ids_TK: Tensor, num_experts: int) -> None:
    """Require ids of -1 to num_experts - 1; reads the values."""
    wrong = (ids_TK < -1) | (ids_TK >= num_experts)
    if bool(wrong.any()):
        value = int(ids_TK[wrong][0])
        raise KernelError(
            f"{name} {describe(ids_TK)} holds the id {value} but {num_experts} experts allow "
            f"0 to {num_experts - 1}, and -1 for none."
        )


def finite(name: str, tensor: Tensor) -> None:
    """Require that no value is NaN or infinite; reads the values, once where all is well."""
    if math.isfinite(tensor.sum(dtype=torch.float32).item()):
        return
    wrong = tensor.numel() - int(torch.isfinite(tensor.float()).sum())
    if wrong:
        raise KernelError(
            f"{name} {describe(tensor)} holds {wrong} values that are NaN or infinite; load the "
            f"weights again from a checked file."
        )


def top_k(k: int, num_experts: int) -> None:
    """Require 1 to E experts a token."""
    if not 1 <= k <= num_experts:
        raise KernelError(f"k ({k}) must be 1 to {num_experts}, the number of experts.")


def block_sizes(block_rows: int, format_rows: int) -> None:
    """Require powers of two, blocks of whole format units."""
    for name, value in (("block_rows", block_rows), ("format_rows", format_rows)):
        if value < 1 or value & (value - 1):
            raise KernelError(f"{name} ({value}) must be a power of two.")
    if block_rows % format_rows:
        raise KernelError(
            f"block_rows ({block_rows}) must be a multiple of format_rows ({format_rows})."
        )


def experts(gate_up: Tensor, down: Tensor, *, dtypes: tuple[torch.dtype, ...] = FLOATS) -> None:
    """Require gate_up (E, 2F, D) and down (E, D, F) of one of these formats on one device."""
    rank("gate_up", gate_up, "E, 2F, D")
    rank("down", down, "E, D, F")
    one_of("gate_up", gate_up, dtypes)
    num_experts, double, width = gate_up.shape
    if double % 2:
        raise KernelError(f"gate_up is {describe(gate_up)} but its second axis, 2F, must be even.")
    if not width or not double:
        raise KernelError(
            f"gate_up is {describe(gate_up)} but its last two axes, 2F and D, must be above 0."
        )
    because = f"gate_up {describe(gate_up)}"
    shape("down", down, (num_experts, width, double // 2), because)
    if down.dtype != gate_up.dtype:
        raise KernelError(f"down is {describe(down)} but must have the format of {because}.")
    same_device(gate_up=gate_up, down=down)


def rows(name: str, x: Tensor, gate_up: Tensor) -> None:
    """Require rows (…, D) that `gate_up` (E, 2F, D) can take, on its device."""
    rank(name, x, "T, D")
    one_of(name, x, FLOATS)
    if x.shape[1] != gate_up.shape[2]:
        raise KernelError(
            f"{name} is {describe(x)} but gate_up {describe(gate_up)} takes rows of width "
            f"{gate_up.shape[2]}."
        )
    same_device(**{name: x, "gate_up": gate_up})


def groups(rows_RD: Tensor, counts: Sequence[int], experts: Sequence[int], gate_up: Tensor) -> None:
    """Require rows (R, D) in the format of `gate_up`, counts that sum to R, and experts 0 to E - 1.

    All that fits costs a few comparisons; what is wrong is looked for only when something is.
    """
    num_experts, _, width = gate_up.shape
    try:
        fits = (
            isinstance(total := sum(counts), int)
            and rows_RD.shape == (total, width)
            and rows_RD.dtype == gate_up.dtype
            and rows_RD.device == gate_up.device
            and len(counts) == len(experts)
            and min(counts, default=0) >= 0
            and min(experts, default=0) >= 0
            and isinstance(last := max(experts, default=-1), int)
            and last < num_experts
            and not (rows_RD.is_meta or rows_RD.is_sparse)
        )
    except (TypeError, AttributeError):  # no tensor, or no whole numbers
        fits = False
    if not fits:
        _refuse_groups(rows_RD, counts, experts, gate_up)


def _refuse_groups(
    rows_RD: Tensor, counts: Sequence[int], experts: Sequence[int], gate_up: Tensor
) -> None:
    """Raise the first thing that `groups` found wrong."""
    rows("rows_RD", rows_RD, gate_up)
    has_values("gate_up", gate_up)
    if rows_RD.dtype != gate_up.dtype:
        raise KernelError(
            f"rows_RD is {describe(rows_RD)} but must have the format of gate_up "
            f"{describe(gate_up)}."
        )
    for name, numbers in (("counts", counts), ("experts", experts)):
        if not isinstance(numbers, Sequence) or not all(isinstance(n, int) for n in numbers):
            raise KernelError(f"{name} ({numbers!r}) must be a list of whole numbers.")
    if len(counts) != len(experts):
        raise KernelError(
            f"counts has {len(counts)} groups but experts {len(experts)}; name one expert a group."
        )
    if min(counts, default=0) < 0 or sum(counts) != rows_RD.shape[0]:
        raise KernelError(
            f"counts sum to {sum(counts)}, the least is {min(counts, default=0)}, but must be at "
            f"least 0 and sum to the rows of rows_RD {describe(rows_RD)}."
        )
    wrong = [expert for expert in experts if not 0 <= expert < gate_up.shape[0]]
    raise KernelError(
        f"experts holds {wrong[0]} but gate_up {describe(gate_up)} allows 0 to "
        f"{gate_up.shape[0] - 1}."
    )


def routing(ids_TK: Tensor, weights_TK: Tensor, num_tokens: int) -> None:
    """Require ids and weights (T, K) for the T tokens at hand."""
    ids_matrix("topk_ids_TK", ids_TK)
    one_of("topk_weights_TK", weights_TK, (torch.float32,))
    if ids_TK.shape[0] != num_tokens:
        raise KernelError(
            f"topk_ids_TK is {describe(ids_TK)} but x_TD holds {num_tokens} tokens; pass one row "
            f"of ids for each."
        )
    because = f"topk_ids_TK {describe(ids_TK)}"
    shape("topk_weights_TK", weights_TK, tuple(ids_TK.shape), because)
    same_device(topk_ids_TK=ids_TK, topk_weights_TK=weights_TK)
