"""One way a Triton kernel is compiled for use: its argument types, constants and launch options.

Each kernel module lists its own in `variants()`; `engine.kernels.inspect` compiles them, and the
tests' compile matrix holds them to a budget. Importing this needs no Triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A kernel with everything the compiler needs to know, and what is expected of the result."""

    name: str
    """Unique within its module, such as `down.bf16.64x128x64.masked`."""
    kernel: Any
    """The function under `@triton.jit`."""
    signature: Mapping[str, str]
    """Argument name -> `*fp32`, `i32`, `i64`, … or `constexpr`, in the order of the arguments."""
    constexprs: Mapping[str, Any]
    """Values of the arguments that are `constexpr`."""
    aligned: tuple[str, ...] = ()
    """Integer arguments that are multiples of 16 at every launch, such as strides. Pointers always
    are; an argument left out costs vector loads and asynchronous copies."""
    num_warps: int = 4
    num_stages: int = 3
    fp_fusion: bool = True
    """Whether a product and a sum may be rounded once (fused multiply-add)."""
    dtype: str = "fp32"
    """Of the operands: fp32, bf16, fp16, fp8, int8."""
    needs_tensor_cores: bool = False
    """Whether the product's instructions must be tensor-core ones."""
    min_capability: int = 80
    """Lowest CUDA capability it is shipped for, times ten: 80, 90, 100."""
