"""Offsets past 32 bits: 131,073 tokens of K·D = 16384, and expert stacks of over 2^31 elements.

131,072 tokens are the last number whose offsets fit; the next must be right too. Everything that
must not be read is NaN, so that a wrong address shows.
"""

from __future__ import annotations

import torch

from workbench.bench.gpu import ours
from workbench.bench.gpu.inputs import Batch
from workbench.bench.gpu.oracle import errors
from workbench.bench.gpu.setting import Row, Setting

TOP_K, WIDTH = 8, 2048
EDGE = 131_072
SAMPLE = 512
STACK = (66, 4096, 8192)
"""E, F, D: gate_up has 4.4e9 elements, down 2.2e9."""
LIMIT = 0.03


def run(setting: Setting) -> None:
    """Check combine, permute and the experts at sizes that overflow 32-bit offsets."""
    for tokens in (EDGE, EDGE + 1):
        num = 5 if setting.dry else tokens
        needed = 2 * num * TOP_K * WIDTH * 2
        with setting.case(op="combine", tokens=num, row_stride=TOP_K * WIDTH) as row:
            if setting.fits(needed):
                _combine(setting, num, row)
            else:
                row["skipped"] = f"needs {needed / 1e9:.0f} GB"
    experts, width, hidden = (3, 16, 32) if setting.dry else STACK
    needed = 2 * 3 * experts * width * hidden
    with setting.case(op="experts", elements=2 * experts * width * hidden) as row:
        if setting.fits(needed):
            _experts(setting, experts, width, hidden, row)
        else:
            row["skipped"] = f"needs {needed / 1e9:.0f} GB"


def _combine(setting: Setting, tokens: int, row: Row) -> None:
    """Combine rows in a shuffled order; compare the last tokens and a sample with fp64."""
    from engine.kernels.gpu.combine import combine

    device = setting.device
    generator = torch.Generator(device).manual_seed(3)
    num_rows = tokens * TOP_K
    out_RD = torch.empty(num_rows, WIDTH, dtype=torch.bfloat16, device=device)
    out_RD.normal_(generator=generator)
    row_of_N = torch.randperm(num_rows, device=device, generator=generator)
    weights_TK = torch.rand(tokens, TOP_K, device=device, generator=generator) + 0.1
    y_TD = combine(out_RD, weights_TK, row_of_N)
    sample = torch.randint(0, tokens, (min(SAMPLE, tokens),), device=device, generator=generator)
    sample[: min(64, tokens)] = torch.arange(max(0, tokens - 64), tokens, device=device)
    gathered = out_RD[row_of_N.view(tokens, TOP_K)[sample]].double()
    reference = (gathered * weights_TK[sample].double().unsqueeze(-1)).sum(1)
    row["largest_error"], row["rms_error"] = errors(y_TD[sample], reference)
    row["right"] = row["largest_error"] < LIMIT


def _experts(setting: Setting, num_experts: int, width: int, hidden: int, row: Row) -> None:
    """Send every token to the last expert of a stack that is NaN but for it."""
    from engine.kernels.gpu.experts import ExpertStack

    device, dtype = setting.device, torch.bfloat16
    generator = torch.Generator(device).manual_seed(4)
    sizes = (num_experts, 2 * width, hidden), (num_experts, hidden, width)
    stacks = []
    for size in sizes:
        stack = torch.full(size, float("nan"), dtype=dtype, device=device)
        stack[-1].normal_(0, size[-1] ** -0.5, generator=generator)
        stacks.append(stack)
    gate_up, down = stacks
    tokens = 5 if setting.dry else 100
    x_TD = torch.randn(tokens, hidden, device=device, generator=generator).to(dtype)
    ids_TK = torch.full((tokens, 1), num_experts - 1, device=device)
    one = Batch(x_TD, ids_TK, torch.ones(tokens, 1, device=device))
    call, _ = ours.layer(ExpertStack(scheme="native", gate_up=gate_up, down=down), one)
    gate, up = (x_TD.double() @ gate_up[-1].double().T).chunk(2, dim=1)
    reference = (gate * torch.sigmoid(gate) * up) @ down[-1].double().T
    row["largest_error"], row["rms_error"] = errors(call(one), reference)
    row["right"] = row["largest_error"] < LIMIT
