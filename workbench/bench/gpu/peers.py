"""What a user would otherwise run, on the same weights and batches: the layer's experts only.

Each entry of `PEERS` takes the weights and returns a call; one that this machine lacks raises
`Absent` with the reason, which goes into the report.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from workbench.bench.gpu.inputs import Batch

Call = Callable[[Batch], Tensor]


class Absent(Exception):
    """This machine or this library version does not have the peer."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A rival for the experts of a layer."""

    name: str
    make: Callable[[Tensor, Tensor, int], Call]
    """Takes gate_up (E, 2F, D), down (E, D, F) and K."""
    capturable: bool
    """Whether it runs without waiting for the device, so that a CUDA graph can hold it."""


def _transformers(gate_up: Tensor, down: Tensor, k: int, *, how: str) -> Call:
    _need("transformers")
    transformers: Any = import_module("transformers")
    mixtral: Any = import_module("transformers.models.mixtral.modeling_mixtral")
    experts_class = getattr(mixtral, "MixtralExperts", None)
    if experts_class is None:
        raise Absent(f"transformers {transformers.__version__} has no stacked experts")
    config = transformers.MixtralConfig(
        hidden_size=gate_up.shape[2],
        intermediate_size=down.shape[2],
        num_local_experts=gate_up.shape[0],
        num_experts_per_tok=k,
    )
    config._experts_implementation = how
    with torch.device("meta"):
        experts = experts_class(config)
    experts.gate_up_proj = torch.nn.Parameter(gate_up, requires_grad=False)
    experts.down_proj = torch.nn.Parameter(down, requires_grad=False)

    def call(batch: Batch) -> Tensor:
        with torch.no_grad():
            result: Tensor = experts(batch.x_TD, batch.ids_TK, batch.weights_TK)
        return result

    return call


def _torch_grouped_mm(gate_up: Tensor, down: Tensor, k: int) -> Call:
    """Sort once, two grouped products, gather home: what torch alone offers."""
    grouped: Any = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if grouped is None:
        raise Absent(f"torch {torch.__version__} has no grouped_mm")
    num_experts = gate_up.shape[0]
    edges = torch.arange(1, num_experts + 1, device=gate_up.device)

    def call(batch: Batch) -> Tensor:
        sorted_ids, order = batch.ids_TK.reshape(-1).sort()
        ends = torch.searchsorted(sorted_ids, edges, side="left").to(torch.int32)
        rows = batch.x_TD[order // k]
        gate, up = grouped(rows, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        out = grouped(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
        home = torch.empty_like(out).index_copy_(0, order, out)
        weighted = home.view(-1, k, home.shape[1]) * batch.weights_TK.unsqueeze(-1)
        return weighted.sum(1).to(batch.x_TD.dtype)

    return call


def _vllm(gate_up: Tensor, down: Tensor, k: int) -> Call:
    _need("vllm")
    experts = import_module("vllm.model_executor.layers.fused_moe").fused_experts
    return _fused(experts, gate_up, down)


def _sglang(gate_up: Tensor, down: Tensor, k: int) -> Call:
    _need("sglang")
    module = import_module("sglang.srt.layers.moe.fused_moe_triton.fused_moe")
    return _fused(module.fused_experts_impl, gate_up, down)


def _fused(experts: Any, gate_up: Tensor, down: Tensor) -> Call:
    def call(batch: Batch) -> Tensor:
        ids_TK = batch.ids_TK.to(torch.int32)
        result: Tensor = experts(batch.x_TD, gate_up, down, batch.weights_TK, ids_TK)
        return result

    return call


def _need(package: str) -> None:
    if find_spec(package) is None:
        raise Absent(f"{package} is not installed")


PEERS = (
    Peer("transformers eager", partial(_transformers, how="eager"), False),
    Peer("transformers grouped_mm", partial(_transformers, how="grouped_mm"), False),
    Peer("torch grouped_mm", _torch_grouped_mm, True),
    Peer("vllm fused_experts", _vllm, True),
    Peer("sglang fused_experts", _sglang, True),
)
