"""One MoE layer's experts on the CPU: ours against transformers' own implementations, one run.

All start from the same rows, ids and weights and give the layer's sum; the gate is left out. Ours
is what the engine runs: dispatch, experts as the registry chose them, combine. Contenders take
turns, round by round. A row's roofline is the larger of two times measured in the same run: the
bytes it must read at the speed of a copy of that size, and its products at the speed of one large
product.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.errors import RequestError
from engine.kernels import reference, trials
from engine.kernels.experts import ExpertWeights
from engine.kernels.registry import Target, bind
from workbench.bench.machine import report, torch_threads

PEERS = ("eager", "batched_mm", "grouped_mm")
MOST_COPIED = 8e9
"""Bytes of weights that `batched_mm` may copy; where it would need more it is left out."""
BURST_MS = 2.0
"""How long a contender runs at a time, at least once."""
AIMS = {"fp32": 1.15, "bf16": 1.5, "worst": 0.95, "roofline": 0.6, "int8_over_bf16": 1.3}
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2, "int8": 3e-2}
"""Root mean square of the errors over that of the exact outputs."""

Run = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """The experts of one layer."""

    name: str
    num_experts: int
    k: int
    width: int
    """D"""
    inner: int
    """F"""


SHAPES = (
    Shape("polyglot-moe", 8, 2, 256, 256),
    Shape("E64-K8-D1024-F512", 64, 8, 1024, 512),
)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one size with their experts."""

    x_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor

    @property
    def num_active(self) -> int:
        """How many experts have rows."""
        return int((torch.bincount(self.ids_TK.view(-1)) > 0).sum())


def run(
    _model: Path | None = None,
    *,
    tokens: tuple[int, ...] = (1, 8, 64, 512),
    rounds: int = 9,
    threads: int | None = None,
) -> dict[str, Any]:
    """Measure one row per shape, number of tokens and number format; no model is read.

    Args:
        tokens: sizes of the batch.
        rounds: turns of each contender; one more, before, is thrown away.
        threads: of one product; None leaves torch's setting.

    Raises:
        RequestError: a number is below 1.
    """
    if min(*tokens, rounds) < 1:
        raise RequestError("tokens and rounds must be whole numbers of at least 1.")
    rows: list[dict[str, Any]] = []
    with torch_threads(threads), torch.inference_mode():
        for shape in SHAPES:
            for formats in (("fp32",), ("bf16", "int8")):
                rows += _rows(shape, formats, tokens, rounds)
        words = f"--tokens {','.join(map(str, tokens))} --rounds {rounds}"
        words += f" --threads {threads}" if threads else ""
        return report(rows, f"workbench bench moe-layer {words} --json") | _summary(rows)


def _rows(
    shape: Shape, formats: tuple[str, ...], tokens: tuple[int, ...], rounds: int
) -> list[dict[str, Any]]:
    """Measure the formats that share their peers, which run in the first of them."""
    dtype = torch.float32 if formats[0] == "fp32" else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(shape.num_experts, 2 * shape.inner, shape.width, generator=generator)
    down = torch.randn(shape.num_experts, shape.width, shape.inner, generator=generator)
    gate_up = (gate_up * shape.width**-0.5).to(dtype)
    down = (down * shape.inner**-0.5).to(dtype)
    ours = {name: Layer(shape, name, gate_up.clone(), down.clone()) for name in formats}
    peers = _peers(shape, gate_up, down)
    rate = {name: _product_rate(name) for name in formats}
    rows = []
    for num_tokens in tokens:
        batch = _batch(shape, num_tokens, dtype, generator)
        copied = num_tokens * shape.k * 3 * shape.width * shape.inner * dtype.itemsize
        contenders: dict[str, Run] = {}
        for name, layer in ours.items():
            contenders[name] = _bound(layer, batch)
        for name, peer in peers.items():
            if name != "batched_mm" or copied <= MOST_COPIED:
                contenders[name] = _bound(peer, batch)
        _check(contenders, batch, gate_up, down)
        milliseconds = _turns(contenders, rounds)
        for name in formats:
            rows.append(_row(shape, name, batch, milliseconds, ours[name], rate[name]))
            if "batched_mm" in peers and "batched_mm" not in contenders:
                rows[-1]["left_out"] = f"batched_mm: would copy {copied / 1e9:.0f} GB of weights"
    return rows


def _row(
    shape: Shape, name: str, batch: Batch, ms: dict[str, float], layer: Layer, rate: float
) -> dict[str, Any]:
    """Put one measurement beside its peers and its roofline."""
    peers_ms = {peer: round(ms[peer], 4) for peer in PEERS if peer in ms}
    matrix = 3 * shape.width * shape.inner
    num_bytes = batch.num_active * matrix * {"fp32": 4, "bf16": 2, "int8": 1}[name]
    memory_ms = num_bytes / _copy_rate(num_bytes) * 1e3
    compute_ms = 2.0 * batch.ids_TK.numel() * matrix / rate * 1e3
    row = {
        "shape": shape.name,
        "tokens": len(batch.x_TD),
        "dtype": name,
        "kernel": layer.kernel,
        "ways": layer.ways(name),
        "ours_ms": round(ms[name], 4),
        "peers_ms": peers_ms,
        "speedup_over_best_peer": None,
        "roofline_ms": round(max(memory_ms, compute_ms), 4),
        "bound": "memory" if memory_ms >= compute_ms else "compute",
        "roofline_share": round(max(memory_ms, compute_ms) / ms[name], 3),
        "rows_per_expert": round(batch.ids_TK.numel() / batch.num_active, 1),
    }
    if peers_ms:
        row["speedup_over_best_peer"] = round(min(peers_ms.values()) / ms[name], 3)
    if name == "int8":
        row["speedup_over_own_bf16"] = round(ms["bf16"] / ms[name], 3)
    return row


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures the aims speak of, and which aims are met."""
    compared = [r for r in rows if r["dtype"] != "int8" and r["speedup_over_best_peer"]]
    large = [r["roofline_share"] for r in rows if r["shape"] == SHAPES[-1].name]
    int8 = [
        r["speedup_over_own_bf16"]
        for r in rows
        if r["dtype"] == "int8" and 8 <= r["rows_per_expert"] <= 64
    ]
    found: dict[str, float | None] = {
        name: _geomean([r["speedup_over_best_peer"] for r in compared if r["dtype"] == name])
        for name in ("fp32", "bf16")
    }
    worst = min((r["speedup_over_best_peer"] for r in compared), default=None)
    figures = found | {
        "worst": worst,
        "roofline": min(large, default=None),
        "int8_over_bf16": min(int8, default=None),
    }
    return {
        "geomean_speedup": found,
        "worst_speedup": worst,
        "worst_roofline_share_large": figures["roofline"],
        "worst_int8_over_bf16": figures["int8_over_bf16"],
        "aims": {
            name: {"aim": aim, "measured": value, "met": value is not None and value >= aim}
            for name, aim in AIMS.items()
            for value in [figures[name]]
        },
        "peers_formula": "int8 rows stand beside peers in bf16: transformers has no int8 experts",
    }


class Layer:
    """Our layer in one number format, as an engine would bind it."""

    def __init__(self, shape: Shape, name: str, gate_up: Tensor, down: Tensor) -> None:
        self.ops = bind(
            Target(
                device="cpu",
                dtype=str(gate_up.dtype).removeprefix("torch."),
                deterministic=False,
                scheme="w8a8" if name == "int8" else "native",
                expert_bytes=gate_up[0].numel() * gate_up.itemsize,
                measure=True,
            )
        )
        self.experts = list(range(shape.num_experts))
        self.weights = ExpertWeights(gate_up, down, self.ops.prepare_experts)
        self.weights.refresh()
        self.kernel = next(c.name for c in self.ops.reasons if c.op == "grouped_mlp")

    def ways(self, name: str) -> list[str]:
        """Say how the two products are made, where that was measured."""
        if self.kernel == "columns":
            return []
        kind = "int8" if name == "int8" else str(self.weights.down.dtype).removeprefix("torch.")
        shapes = [stack.shape[1:] for stack in (self.weights.gate_up, self.weights.down)]
        return [trials.words(trials.plan(kind, *shape)) for shape in shapes]

    def __call__(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return (T, D): dispatch, experts, combine."""
        source_R, row_of_N, counts = self.ops.permute(ids_TK, len(self.experts))
        rows_RD = x_TD.index_select(0, source_R)
        out_RD = self.ops.grouped_mlp(rows_RD, counts, self.experts, self.weights)
        y_TD: Tensor = self.ops.combine(out_RD, weights_TK, row_of_N)
        return y_TD


def _peers(shape: Shape, gate_up: Tensor, down: Tensor) -> dict[str, Callable[..., Tensor]]:
    """Return transformers' experts by implementation, on these weights; {} without transformers."""
    if not find_spec("transformers"):
        return {}
    family: Any = import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    settings: Any = import_module("transformers.models.qwen3_moe.configuration_qwen3_moe")
    peers = {}
    for name in PEERS:
        config = settings.Qwen3MoeConfig(
            hidden_size=shape.width,
            moe_intermediate_size=shape.inner,
            num_experts=shape.num_experts,
            num_experts_per_tok=shape.k,
        )
        config._experts_implementation = name
        with torch.device("meta"):
            experts = family.Qwen3MoeExperts(config)
        experts.gate_up_proj = torch.nn.Parameter(gate_up, requires_grad=False)
        experts.down_proj = torch.nn.Parameter(down, requires_grad=False)
        peers[name] = experts.eval()
    return peers


def _batch(shape: Shape, num_tokens: int, dtype: torch.dtype, generator: torch.Generator) -> Batch:
    """Return random rows; every expert is as likely as every other."""
    scores_TE = torch.rand(num_tokens, shape.num_experts, generator=generator)
    weights_TK = torch.rand(num_tokens, shape.k, generator=generator)
    return Batch(
        torch.randn(num_tokens, shape.width, generator=generator).to(dtype),
        scores_TE.argsort(1)[:, : shape.k].contiguous(),
        weights_TK / weights_TK.sum(1, keepdim=True),
    )


def _bound(layer: Callable[..., Tensor], batch: Batch) -> Run:
    return lambda: layer(batch.x_TD, batch.ids_TK, batch.weights_TK)


def _check(contenders: dict[str, Run], batch: Batch, gate_up: Tensor, down: Tensor) -> None:
    """Hold the first tokens of each contender against the oracle: a wrong layer is not timed."""
    few = slice(0, 2)
    exact = reference.moe(batch.x_TD[few], batch.ids_TK[few], batch.weights_TK[few], gate_up, down)
    for name, contender in contenders.items():
        wrong = contender()[few].double() - exact
        error = float((wrong.square().mean() / exact.square().mean()).sqrt())
        kind = name if name in TOLERANCE else "fp32" if gate_up.itemsize == 4 else "bf16"
        assert error < TOLERANCE[kind], f"{name} is off by {error:.3g} of the outputs' size"


def _turns(contenders: dict[str, Run], rounds: int) -> dict[str, float]:
    """Return each contender's median milliseconds; those ten times slower than the best sit out."""
    warm = {name: _burst(contender, 1) for name, contender in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name, contender in contenders.items():
            if number < 2 or warm[name] < 10 * min(warm.values()):
                times[name].append(_burst(contender, max(1, int(BURST_MS / warm[name]))))
    return {name: statistics.median(found) for name, found in times.items()}


def _burst(contender: Run, calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        contender()
    return (time.perf_counter() - began) * 1e3 / calls


def _copy_rate(num_bytes: int) -> float:
    """Return bytes read and written a second by a copy that touches `num_bytes` in all."""
    source = torch.ones(num_bytes // 2, dtype=torch.uint8)
    target = torch.empty_like(source)
    best = min(_burst(lambda: target.copy_(source), 3) for _ in range(6))
    return num_bytes / best * 1e3


def _product_rate(name: str, size: int = 1024) -> float:
    """Return operations a second of one large product in a format."""
    if name == "int8":
        left, right = (torch.ones(size, size, dtype=torch.int8) for _ in range(2))
        best = min(_burst(lambda: torch._int_mm(left, right), 2) for _ in range(6))
    else:
        dtype = torch.float32 if name == "fp32" else torch.bfloat16
        left, right = (torch.ones(size, size, dtype=dtype) for _ in range(2))
        best = min(_burst(lambda: left @ right, 2) for _ in range(6))
    return 2.0 * size**3 / best * 1e3


def _geomean(values: list[float]) -> float | None:
    if not values:
        return None
    return round(math.exp(sum(map(math.log, values)) / len(values)), 3)
