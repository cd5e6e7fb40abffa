"""The two rates that bound every kernel here: moving bytes, and products on the tensor cores.

Measured first, on random data (zeros run faster), and used by every later section.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.bench.gpu.setting import NO_FP8, Row, Setting
from workbench.bench.gpu.timing import milliseconds

COPY_BYTES = 4 << 30
SIDE = 8192


def run(setting: Setting) -> None:
    """Measure `copy_gbs`, `bf16_tflops` and, where the chip has it, `fp8_tflops`."""
    size, side = (1 << 16, 64) if setting.dry else (COPY_BYTES, SIDE)
    device = setting.device
    with setting.case(ceiling="copy_gbs", of="bytes read and written by a copy") as row:
        source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        ms = milliseconds([lambda: target.copy_(source)], device)
        _keep(setting, row, 2 * size / ms / 1e6)
    with setting.case(ceiling="bf16_tflops", of=f"a product of side {side}") as row:
        a, b = (_random(side, device) for _ in range(2))
        _keep(setting, row, _tflops(side, milliseconds([lambda: a @ b.T], device)))
    with setting.case(ceiling="fp8_tflops", of=f"e4m3, a product of side {side}") as row:
        if setting.has_fp8:
            _keep(setting, row, _tflops(side, _fp8_milliseconds(side, device)))
        else:
            row["skipped"] = NO_FP8


def _keep(setting: Setting, row: Row, value: float) -> None:
    if not setting.dry:  # a CPU's rate says nothing here
        row["value"] = value


def _random(side: int, device: torch.device) -> Tensor:
    return torch.randn(side, side, device=device).to(torch.bfloat16)


def _fp8_milliseconds(side: int, device: torch.device) -> float:
    a, b = (_random(side, device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)

    def product() -> Tensor:
        return torch._scaled_mm(a, b.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    return milliseconds([product], device)


def _tflops(side: int, ms: float) -> float:
    return 2 * side**3 / ms / 1e9
