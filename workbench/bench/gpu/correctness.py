"""Every operation against an oracle, on the device: grids of sizes, loads and formats.

Selection is held against the torch twin on the CPU, movement bit for bit, the layer against fp64.
Each numeric check is shown to fail for a wrong result (the rows named `control`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workbench.bench.gpu import ours
from workbench.bench.gpu.inputs import Batch, batch, native_weights
from workbench.bench.gpu.oracle import errors, moe
from workbench.bench.gpu.setting import NO_FP8, Row, Setting
from workbench.bench.gpu.shapes import Shape

if TYPE_CHECKING:
    from engine.kernels.gpu.experts import ExpertStack

EVEN = Shape(name="even", hidden=256, width=128, num_experts=8, top_k=2)
ODD = Shape(name="odd", hidden=200, width=88, num_experts=60, top_k=5)
ONE = Shape(name="one expert", hidden=256, width=128, num_experts=1, top_k=1)
ALL = Shape(name="every expert", hidden=256, width=128, num_experts=4, top_k=4)
TINY = Shape(name="tiny", hidden=40, width=24, num_experts=3, top_k=2)
LOADS = ("uniform", "skewed", "one", "gaps")

Limits = tuple[float, float]
TOLERANCES: dict[str, dict[str, Limits]] = {
    "native": {"float32": (2e-5, 2e-6), "bfloat16": (0.03, 6e-3), "float16": (4e-3, 8e-4)},
    "w8a8": {"bfloat16": (0.3, 0.03)},
    "w8a16": {"bfloat16": (0.03, 6e-3)},
    "e4m3": {"bfloat16": (0.5, 0.09)},
    "mixed_int8": {"bfloat16": (0.3, 0.04)},
    "mixed_e4m3": {"bfloat16": (0.7, 0.12)},
}
"""Scheme -> format of the rows -> largest and RMS error allowed, against fp64 on the weights as
stored (mixed: on the native ones). About twice what rounding alone gives on this grid."""
LOOSEST = max(limits for formats in TOLERANCES.values() for limits in formats.values())


def run(setting: Setting) -> None:
    """Check movement, selection, and the layer in the rows' own format."""
    _movement(setting)
    _selection(setting)
    _layers(setting, ("native",))


def formats(setting: Setting) -> None:
    """Check the layer in every other scheme."""
    _layers(setting, tuple(scheme for scheme in TOLERANCES if scheme != "native"))


def _movement(setting: Setting) -> None:
    from engine.kernels import permute as twin
    from engine.kernels.gpu.permute import permute

    sizes = ((0, 2, 8), (1, 1, 1), (33, 5, 60), (600, 8, 256), (3000, 8, 60))
    for tokens, k, num_experts in sizes[: 3 if setting.dry else None]:
        names = {"op": "permute", "tokens": tokens, "top_k": k, "experts": num_experts}
        if setting.late(**names):
            continue
        with setting.case(**names) as row:
            shape = Shape(name="", hidden=16, width=16, num_experts=num_experts, top_k=k)
            one = batch(shape, tokens, setting.device, torch.float32, load="gaps")
            found = permute(one.ids_TK, num_experts, 16)
            wanted = twin.permute(one.ids_TK.cpu(), num_experts)
            num_rows = len(wanted.source_R)
            row["right"] = (
                found.counts_P.tolist() == wanted.counts
                and torch.equal(found.source_N[:num_rows].cpu(), wanted.source_R)
                and torch.equal(found.row_of_N.cpu(), wanted.row_of_N)
            )


def _selection(setting: Setting) -> None:
    from engine.kernels import topk as twin
    from engine.kernels.gpu.topk import route
    from engine.kernels.router import RouterConfig

    routers: dict[str, tuple[RouterConfig, int]] = {
        "softmax": (RouterConfig.softmax(2, renormalise=True), 8),
        "softmax, not renormalised": (RouterConfig.softmax(8, renormalise=False), 60),
        "top-k then softmax, bias": (RouterConfig.gpt_oss(4), 128),
        "top-k then sigmoid": (RouterConfig.llama4(1), 16),
        "groups by best": (RouterConfig.deepseek_v2(6, num_groups=8, keep=3, scale=16.0), 160),
        "groups by two best": (RouterConfig.deepseek_v3(8, num_groups=8, keep=4, scale=2.5), 256),
        "root of softplus": (RouterConfig.deepseek_v4(6), 256),
        "two steps": (RouterConfig.phimoe(), 16),
    }
    if setting.dry:
        routers = {name: routers[name] for name in ("softmax", "groups by two best")}
    for name, (router, num_experts) in routers.items():
        if setting.late(op="topk", router=name):
            continue
        with setting.case(op="topk", router=name, experts=num_experts) as row:
            tokens = 3 if setting.dry else 300
            generator = torch.Generator().manual_seed(7)
            logits_TE = torch.randn(tokens, num_experts, generator=generator)
            bias_E = torch.randn(num_experts, generator=generator) * 0.1
            logits_TE[0], logits_TE[1, 0] = 0.25, float("nan")  # a tie throughout, a broken row
            linear_E = bias_E if router.logit_bias else None
            selecting_E = bias_E if router.selection_bias else None
            wanted = twin.route(
                logits_TE, router, logit_bias_E=linear_E, selection_bias_E=selecting_E
            )
            found = route(
                logits_TE.to(setting.device),
                router,
                logit_bias_E=_to(linear_E, setting.device),
                selection_bias_E=_to(selecting_E, setting.device),
            )
            row["right"] = torch.equal(found.topk_ids_TK.cpu(), wanted.topk_ids_TK)
            row["largest_error"] = errors(found.topk_weights_TK.cpu(), wanted.topk_weights_TK)[0]
            row["right"] = row["right"] and row["largest_error"] < 1e-5
            row["bad_rows"] = int(found.bad_rows)
            row["right"] = row["right"] and row["bad_rows"] == 1


def _to(bias_E: Tensor | None, device: torch.device) -> Tensor | None:
    return None if bias_E is None else bias_E.to(device)


def _layers(setting: Setting, schemes: tuple[str, ...]) -> None:
    shapes = (TINY,) if setting.dry else (EVEN, ODD, ONE, ALL)
    controlled = False
    for scheme in schemes:
        for dtype in TOLERANCES[scheme]:
            for shape in shapes if scheme == "native" or setting.dry else shapes[:2]:
                names = {"op": "layer", "scheme": scheme, "dtype": dtype, "shape": shape.name}
                if "e4m3" in scheme and not setting.has_fp8:
                    setting.keep(names | {"skipped": NO_FP8})
                    continue
                if setting.late(**names):
                    continue
                with setting.case(**names) as row:
                    outcome = _layer(setting, shape, scheme, dtype, row)
                if not controlled and outcome is not None:
                    controlled = True
                    _controls(setting, *outcome)


def _layer(
    setting: Setting, shape: Shape, scheme: str, dtype: str, row: Row
) -> tuple[Batch, Tensor, Tensor, Tensor] | None:
    """Compare one scheme at several loads and sizes; keep the worst case of each."""
    device, kind = setting.device, getattr(torch, dtype)
    gate_up, down = native_weights(shape, device, kind)
    experts, stored = _stack(gate_up, down, scheme)
    worst: Limits = (0.0, 0.0)
    outcome = None
    for load, tokens in _sizes(setting):
        one = batch(shape, tokens, device, kind, seed=tokens, load=load)
        actual = _run(experts, one, scheme)
        reference = moe(one, *stored)
        found = errors(actual, reference)
        worst = max(worst[0], found[0]), max(worst[1], found[1])
        if load == "uniform" and tokens > 1:
            outcome = one, *stored, reference
    limits = TOLERANCES[scheme][dtype]
    row |= {"largest_error": worst[0], "rms_error": worst[1]}
    row["limits"] = f"{limits[0]:g}, {limits[1]:g}"
    row["right"] = not _exceeds(worst, limits)
    return outcome


def _exceeds(found: Limits, limits: Limits) -> bool:
    return found[0] > limits[0] or found[1] > limits[1]


def _sizes(setting: Setting) -> Iterator[tuple[str, int]]:
    for load in ("uniform",) if setting.dry else LOADS:
        for tokens in (5,) if setting.dry else (1, 7, 33, 300):
            yield load, tokens
    yield "uniform", 0


def _stack(gate_up: Tensor, down: Tensor, scheme: str) -> tuple[ExpertStack, tuple[Tensor, Tensor]]:
    """Return the experts in a scheme, and the weights they stand for."""
    from engine.kernels.gpu.experts import ExpertStack
    from engine.kernels.quant import quantise_experts

    if scheme == "native":
        return ExpertStack(scheme=scheme, gate_up=gate_up, down=down), (gate_up, down)
    form = "e4m3" if "e4m3" in scheme else "int8"
    quantised = quantise_experts(gate_up, down, form)
    if scheme.startswith("mixed"):
        stack = ExpertStack(scheme=scheme, gate_up=gate_up, down=down, quantised=quantised)
        return stack, (gate_up, down)
    return ExpertStack(scheme=scheme, quantised=quantised), quantised.dequantised()


def _run(experts: ExpertStack, one: Batch, scheme: str) -> Tensor:
    from engine.kernels.gpu.combine import combine
    from engine.kernels.gpu.experts import tiles_for
    from engine.kernels.gpu.grouped_gemm import grouped_mlp
    from engine.kernels.gpu.permute import num_blocks_bound, permute
    from engine.kernels.quant import FORMAT_ROWS, FORMATS, NATIVE

    if not scheme.startswith("mixed"):
        return ours.layer(experts, one)[0](one)
    num_pairs, num_experts = one.ids_TK.numel(), experts.num_experts
    tiles = tiles_for(experts, one.x_TD.dtype, num_pairs, num_experts, one.x_TD.device)
    permutation = permute(one.ids_TK, num_experts, tiles.gate_up.tokens)
    other = FORMATS["e4m3" if "e4m3" in scheme else "int8"]
    units = num_blocks_bound(num_pairs, num_experts, FORMAT_ROWS)
    formats_U = torch.full((units,), NATIVE, dtype=torch.int8, device=one.x_TD.device)
    formats_U[::2] = other
    out_ND = grouped_mlp(one.x_TD, permutation, experts, tiles=tiles, formats_U=formats_U)
    return combine(out_ND, one.weights_TK, permutation.row_of_N, num_rows=permutation.num_rows)


def _controls(
    setting: Setting, one: Batch, gate_up: Tensor, down: Tensor, reference: Tensor
) -> None:
    """Show that the check sees each kind of wrong result."""
    k = one.ids_TK.shape[1]
    swapped = one.ids_TK.clone()
    swapped[one.ids_TK == 0], swapped[one.ids_TK == 1] = 1, 0
    dropped = one.ids_TK.clone()
    dropped[-1] = -1
    wrong = {
        "zeros": torch.zeros_like(reference),
        "two experts swapped": moe(replace(one, ids_TK=swapped), gate_up, down),
        "one token dropped": moe(replace(one, ids_TK=dropped), gate_up, down),
        "weights not normalised": moe(replace(one, weights_TK=one.weights_TK * k), gate_up, down),
        "not a number": torch.full_like(reference, float("nan")),
    }
    for name, result in wrong.items():
        with setting.case(op="control", wrong=name) as row:
            row["largest_error"], row["rms_error"] = found = errors(result, reference)
            row["right"] = _exceeds(found, LOOSEST)
