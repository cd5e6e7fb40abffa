"""The experts of one layer on a GPU: weights in the formats of a scheme, and memory to run them.

Called by `engine.kernels.gpu.layer`, which allocates, and `grouped_gemm`, which reads and writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.errors import KernelError
from engine.kernels import checks
from engine.kernels.gpu.quant import DTYPES
from engine.kernels.gpu.tiles import SCHEMES, TileChoice, choose_tiles
from engine.kernels.quant import QuantisedExperts

NATIVE_SCHEMES = ("native", "mixed_int8", "mixed_e4m3")
ONE_BYTE = {
    "w8a8": "int8",
    "w8a16": "int8",
    "e4m3": "e4m3",
    "mixed_int8": "int8",
    "mixed_e4m3": "e4m3",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertStack:
    """The weights of one layer's experts in the formats that a scheme needs."""

    scheme: str
    """One of `tiles.SCHEMES`."""
    gate_up: Tensor | None = None
    """(E, 2F, D) gate rows before up rows, in the rows' format; for `native` and `mixed_*`."""
    down: Tensor | None = None
    """(E, D, F)."""
    quantised: QuantisedExperts | None = None
    """The same weights in one byte each; for every scheme but `native`."""

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise KernelError(f"scheme ({self.scheme!r}) must be one of {', '.join(SCHEMES)}.")
        if self.scheme in NATIVE_SCHEMES:
            if self.gate_up is None or self.down is None:
                raise KernelError(f"scheme {self.scheme} needs gate_up and down; pass both.")
            checks.experts(self.gate_up, self.down)
            checks.contiguous("gate_up", self.gate_up)
            checks.contiguous("down", self.down)
        if self.scheme in ONE_BYTE:
            self._check_quantised(ONE_BYTE[self.scheme])

    def _check_quantised(self, kind: str) -> None:
        if self.quantised is None:
            raise KernelError(f"scheme {self.scheme} needs quantised weights ({kind}).")
        gate_up, down = self.quantised.gate_up, self.quantised.down
        checks.experts(gate_up.values, down.values, dtypes=(DTYPES[kind],))
        for which, one in (("gate_up", gate_up), ("down", down)):
            checks.contiguous(f"quantised.{which}.values", one.values)
            name, because = f"quantised.{which}.scales", f"its values {checks.describe(one.values)}"
            size = (one.values.shape[0], one.values.shape[1])
            checks.memory(name, one.scales, size, torch.float32, because)
            there = {name: one.scales, f"quantised.{which}.values": one.values}
            checks.same_device(**there, gate_up=self.gate_up)
        if self.gate_up is not None:
            because = f"gate_up {checks.describe(self.gate_up)}"
            wanted = tuple(self.gate_up.shape)
            checks.shape("quantised.gate_up.values", gate_up.values, wanted, because)

    @property
    def any_gate_up(self) -> Tensor:
        """(E, 2F, D) in the rows' format if it is there, else in one byte."""
        if self.gate_up is not None:
            return self.gate_up
        assert self.quantised is not None
        return self.quantised.gate_up.values

    @property
    def num_experts(self) -> int:
        """E."""
        return self.any_gate_up.shape[0]

    @property
    def inner(self) -> int:
        """F."""
        return self.any_gate_up.shape[1] // 2

    @property
    def width(self) -> int:
        """D."""
        return self.any_gate_up.shape[2]


class Scratch(NamedTuple):
    """Memory of one layer's experts for N rows; what a scheme does not need is None."""

    inner_NF: Tensor
    """(N, F) what the gated product gives."""
    out_ND: Tensor
    """(N, D)."""
    tokens: tuple[Tensor, Tensor] | None
    """(T, D) and (T,): the tokens in one byte a value, and their scales."""
    rows: tuple[Tensor, Tensor] | None
    """(N, F) and (N,): the inner rows likewise."""


def empty_scratch(
    num_tokens: int, num_pairs: int, experts: ExpertStack, dtype: torch.dtype, device: Any
) -> Scratch:
    """Allocate what `grouped_mlp` needs for T tokens and N pairs."""

    def empty(*size: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def quantised(count: int, width: int) -> tuple[Tensor, Tensor] | None:
        name = row_format(experts.scheme)
        if name is None:
            return None
        return empty(count, width, dtype=DTYPES[name]), empty(count, dtype=torch.float32)

    return Scratch(
        inner_NF=empty(num_pairs, experts.inner),
        out_ND=empty(num_pairs, experts.width),
        tokens=quantised(num_tokens, experts.width),
        rows=quantised(num_pairs, experts.inner),
    )


def tiles_for(
    experts: ExpertStack, dtype: torch.dtype, num_pairs: int, num_physical: int, device: Any
) -> TileChoice:
    """Choose tiles for N pairs over P experts."""
    name = str(dtype).removeprefix("torch.")
    rows = num_pairs / max(1, min(num_pairs, num_physical))
    if torch.device(device).type != "cuda":
        return choose_tiles(experts.scheme, name, rows)
    gpu = torch.cuda.get_device_properties(device)
    limit = getattr(gpu, "shared_memory_per_block_optin", gpu.shared_memory_per_block)
    return choose_tiles(experts.scheme, name, rows, device=gpu.name, shared_limit_bytes=limit)


def row_format(scheme: str) -> str | None:
    """Return the one-byte format that a scheme writes rows in, if any."""
    return None if scheme == "w8a16" else ONE_BYTE.get(scheme)
