"""One published layer: ours, its share of the roofline, a graph of it, and the peers.

`ours_ms` and `peers_ms` are launched one by one, `…_graph_ms` are replays of a CUDA graph; a
speed-up compares like with like. The floor is the larger of two times: the weights of every expert
in use, the tokens and the result over the measured copy rate; and the products over the measured
rate of the tensor cores. `roofline_share` is the floor over `ours_graph_ms`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.bench.gpu import ours, timing
from workbench.bench.gpu.inputs import Batch, batch, widened
from workbench.bench.gpu.oracle import errors, moe
from workbench.bench.gpu.peers import PEERS, Absent, Call, Peer
from workbench.bench.gpu.setting import NO_FP8, Row, Setting, sentence
from workbench.bench.gpu.shapes import Shape
from workbench.bench.gpu.timing import graph_milliseconds, milliseconds

if TYPE_CHECKING:
    from engine.kernels.gpu.experts import ExpertStack
    from engine.kernels.gpu.layer import DeviceMoE

ROTATIONS = 4
"""Batches taken in turn, so that few tokens do not find their experts in the cache."""
CHECKED_TOKENS = 8
"""The batch that is held against fp64: larger ones would take the section's time."""
TOLERANCE = {"native": 0.02, "e4m3": 0.1}
"""RMS error over that of the result; e4m3 rounds rows and inner rows to 4 bits of mantissa."""


def run(setting: Setting, *, name: str) -> None:
    """Measure the layer `name` at every batch size."""
    shape = setting.shapes[name]
    device, dtype = setting.device, torch.bfloat16
    if _refused(setting, shape):
        return
    peers_bytes = 2 * shape.num_experts * shape.expert_elements
    with setting.case(shape=name, what="weights") as row:
        experts = ours.stack(shape, device, dtype)
        gate_up, down = experts.gate_up, experts.down
        row["gigabytes"] = shape.bytes / 1e9
        if gate_up is None and setting.fits(peers_bytes):
            assert experts.quantised is not None
            gate_up, down = widened(experts.quantised, dtype)
            row["peers"] = "in bf16, on the values that the e4m3 weights stand for"
        calls, row["absent"] = _peers(gate_up, down, shape.top_k)
    if "error" in row:
        return
    for tokens in setting.tokens:
        if setting.late(shape=name, tokens=tokens):
            continue
        with setting.case(shape=name, tokens=tokens, scheme=shape.scheme) as row:
            batches = [batch(shape, tokens, device, dtype, seed=seed) for seed in range(ROTATIONS)]
            _ours(setting, shape, experts, batches, row)
            _whole(setting, shape, experts, batches[0], row)
            if tokens == min(CHECKED_TOKENS, setting.tokens[-1]) and gate_up is not None:
                _check(shape, experts, batches[0], gate_up, down, row)
            _rivals(setting, shape, calls, batches, experts, row)


def prepare(setting: Setting, *, name: str) -> None:
    """Run each batch size once, so that what `run` times is compiled and in Triton's cache."""
    shape = setting.shapes[name]
    if _refused(setting, shape):
        return
    with setting.case(shape=name, what="weights") as row:
        experts = ours.stack(shape, setting.device, torch.bfloat16)
    if "error" in row:
        return
    for tokens in setting.tokens:
        if setting.late(shape=name, tokens=tokens):
            continue
        with setting.case(shape=name, tokens=tokens):
            one = batch(shape, tokens, setting.device, torch.bfloat16)
            ours.layer(experts, one)[0](one)
            layer = _with_gate(shape, experts, one.x_TD.dtype, setting.device)
            layer(one.x_TD, layer.workspace(tokens, one.x_TD.dtype))
            torch.cuda.synchronize()


def _refused(setting: Setting, shape: Shape) -> bool:
    """Keep a row that says why this device cannot run the layer, if it cannot."""
    why = None
    if shape.scheme == "e4m3" and not setting.has_fp8:
        why = NO_FP8
    elif not setting.fits(shape.bytes):
        why = f"its weights need {shape.bytes / 1e9:.1f} GB"
    if why:
        setting.keep({"shape": shape.name, "skipped": why})
    return why is not None


def _peers(
    gate_up: Tensor | None, down: Tensor | None, k: int
) -> tuple[dict[Peer, Call], dict[str, str]]:
    calls: dict[Peer, Call] = {}
    absent: dict[str, str] = {}
    for peer in PEERS:
        if gate_up is None or down is None:
            absent[peer.name] = "its bf16 weights do not fit this device's memory"
            continue
        try:
            calls[peer] = peer.make(gate_up, down, k)
        except Absent as why:
            absent[peer.name] = str(why)
        except Exception as wrong:  # another version's interface is not our fault to end on
            absent[peer.name] = sentence(wrong)
    return calls, absent


def _ours(
    setting: Setting, shape: Shape, experts: ExpertStack, batches: list[Batch], row: Row
) -> None:
    call, tiles = ours.layer(experts, batches[0])
    row["tiles"] = f"{tiles.gate_up} and {tiles.down}: {tiles.reason}"
    device = setting.device
    calls = [partial(call, one) for one in batches]
    result = calls[0]()
    eager = result.clone()
    if setting.dry:
        row["finite"] = bool(torch.isfinite(eager).all())
        return
    graph = timing.capture(calls[0])
    result.fill_(float("nan"))
    graph.replay()
    row["graph_equals_eager"] = row["right"] = bool(torch.equal(result, eager))
    row["ours_ms"] = milliseconds(calls, device)
    row["ours_graph_ms"] = graph_milliseconds(calls, device)
    row["floor_ms"], row["bound_by"] = _floor(setting, shape, batches)
    if row["floor_ms"] is not None:
        row["roofline_share"] = row["floor_ms"] / row["ours_graph_ms"]


def _whole(setting: Setting, shape: Shape, experts: ExpertStack, one: Batch, row: Row) -> None:
    """Run the whole layer, gate and selection included, by itself and as a graph."""
    from engine.kernels.gpu.layer import capture

    device, dtype, tokens = setting.device, one.x_TD.dtype, one.x_TD.shape[0]
    layer = _with_gate(shape, experts, dtype, device)
    workspace = layer.workspace(tokens, dtype)
    eager = layer(one.x_TD, workspace).clone()
    if setting.dry:
        row["whole_layer_finite"] = bool(torch.isfinite(eager).all())
        return
    replay = capture(layer, tokens, dtype)
    row["whole_layer_graph_equals_eager"] = bool(torch.equal(replay(one.x_TD), eager))
    row["right"] = row.get("right", True) and row["whole_layer_graph_equals_eager"]
    row["whole_layer_ms"] = milliseconds([lambda: layer(one.x_TD, workspace)], device)
    row["whole_layer_graph_ms"] = milliseconds([lambda: replay(one.x_TD)], device)


def _with_gate(
    shape: Shape, experts: ExpertStack, dtype: torch.dtype, device: torch.device
) -> DeviceMoE:
    from engine.kernels.gpu.layer import DeviceMoE
    from engine.kernels.router import RouterConfig

    gate_ED = torch.randn(shape.num_experts, shape.hidden, device=device) * shape.hidden**-0.5
    router = RouterConfig.softmax(shape.top_k, renormalise=True)
    return DeviceMoE(gate_ED.to(dtype), router, experts)


def _floor(setting: Setting, shape: Shape, batches: list[Batch]) -> tuple[float | None, str]:
    """Return the least milliseconds a batch can take, on average, and what bounds it."""
    rate = "fp8_tflops" if shape.scheme == "e4m3" else "bf16_tflops"
    if "copy_gbs" not in setting.ceilings or rate not in setting.ceilings:
        return None, "the ceilings are not known"
    tokens = batches[0].x_TD.shape[0]
    used = sum(torch.unique(one.ids_TK).numel() for one in batches) / len(batches)
    moved = used * shape.expert_elements * shape.weight_bytes + 2 * 2 * tokens * shape.hidden
    operations = 2 * tokens * shape.top_k * shape.expert_elements
    times = {
        "memory": moved / setting.ceilings["copy_gbs"] / 1e6,
        "tensor cores": operations / setting.ceilings[rate] / 1e9,
    }
    bound = max(times, key=lambda name: times[name])
    return times[bound], bound


def _check(
    shape: Shape,
    experts: ExpertStack,
    one: Batch,
    gate_up: Tensor,
    down: Tensor | None,
    row: Row,
) -> None:
    assert down is not None
    reference = moe(one, gate_up, down)
    call, _ = ours.layer(experts, one)
    _, row["rms_error"] = errors(call(one), reference)
    row["right"] = row.get("right", True) and row["rms_error"] < TOLERANCE[shape.scheme]


def _rivals(
    setting: Setting,
    shape: Shape,
    calls: dict[Peer, Call],
    batches: list[Batch],
    experts: ExpertStack,
    row: Row,
) -> None:
    """Run every peer on the same batches; one that fails keeps its reason."""
    mine = ours.layer(experts, batches[0])[0](batches[0])
    launched: dict[str, Any] = {}
    replayed: dict[str, Any] = {}
    differs: dict[str, Any] = {}
    for peer, call in calls.items():
        if setting.seconds_left <= 0:
            differs[peer.name] = "the section's time was up"
            continue
        try:
            _, differs[peer.name] = errors(call(batches[0]), mine)
            if setting.dry:
                continue
            turns = [partial(call, one) for one in batches]
            launched[peer.name] = milliseconds(turns, setting.device)
            if peer.capturable:
                replayed[peer.name] = graph_milliseconds(turns, setting.device)
        except Exception as wrong:
            differs[peer.name] = sentence(wrong)
    row |= {"peers_ms": launched, "peers_graph_ms": replayed, "peers_rms_difference": differs}
    # A peer that computes something else is no peer.
    same = {
        name
        for name, value in differs.items()
        if isinstance(value, float) and value < TOLERANCE[shape.scheme]
    }
    for times, key in ((launched, "ours_ms"), (replayed, "ours_graph_ms")):
        fair = {name: ms for name, ms in times.items() if name in same}
        if fair and key in row:
            best = min(fair, key=lambda name: fair[name])
            kind = "graph_" if "graph" in key else ""
            row[f"{kind}speedup_over_best_peer"] = fair[best] / row[key]
            row[f"{kind}best_peer"] = best
