"""The device's layer never waits for the device: it runs on tensors that have no values.

Tensors on torch's `meta` device have shapes and nothing else, so that whatever reads a value back
(`.item()`, `.tolist()`, `.cpu()`, a shape that depends on values) raises. Launches are recorded
instead of run, and what was recorded is compiled for a GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.kernels import quant
from engine.kernels.router import RouterConfig

triton = pytest.importorskip("triton")

from engine.kernels import inspect as inspector  # noqa: E402
from engine.kernels.gpu import combine, permute  # noqa: E402
from engine.kernels.gpu.experts import ExpertStack  # noqa: E402
from engine.kernels.gpu.grouped_gemm import grouped_mlp  # noqa: E402
from engine.kernels.gpu.layer import DeviceMoE  # noqa: E402
from engine.kernels.gpu.variant import Variant  # noqa: E402

WIDTH, INNER, EXPERTS, SHARED, K = 128, 64, 12, 1, 4
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


class Launch:
    """One launch as the host asked for it, with its arguments by name."""

    def __init__(self, kernel: Any, grid: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        self.kernel, self.grid = kernel, grid
        self.options = {name: kwargs[name] for name in OPTIONS if name in kwargs}
        given = {name: value for name, value in kwargs.items() if name not in OPTIONS}
        bound = inspect.signature(kernel.fn).bind(*args, **given)
        self.arguments = dict(bound.arguments)
        self.constant = {kernel.arg_names[place] for place in kernel.constexprs}
        self.general = {place.name for place in kernel.params if place.do_not_specialize}

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    def variant(self) -> Variant:
        """Return what the launcher would compile for these arguments."""
        signature, constants = {}, {}
        for name, value in self.arguments.items():
            one = type(value) is int and value == 1 and name not in self.general
            if name in self.constant or value is None or one:
                signature[name], constants[name] = "constexpr", value
            else:
                signature[name] = kind_of(value)
        aligned = tuple(n for n, v in self.arguments.items() if type(v) is int and v % 16 == 0)
        return Variant(
            name=self.name,
            kernel=self.kernel,
            signature=signature,
            constexprs=constants,
            aligned=tuple(
                name
                for name in aligned
                if signature[name] != "constexpr" and name not in self.general
            ),
            fp_fusion=self.options.get("enable_fp_fusion", True),
            num_warps=self.options.get("num_warps", 4),
            num_stages=self.options.get("num_stages", 3),
        )


def kind_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        names = {"float32": "fp32", "bfloat16": "bf16", "float8_e4m3fn": "fp8e4nv", "uint8": "u8"}
        name = str(value.dtype).removeprefix("torch.")
        return "*" + names.get(name, name.replace("int", "i"))
    return "i32" if isinstance(value, int) else "fp32"


@pytest.fixture
def launches(monkeypatch):
    """Record launches instead of running them."""
    found: list[Launch] = []

    def record(self, *args, grid, warmup, **kwargs):
        found.append(Launch(self, grid, args, kwargs))

    monkeypatch.setattr(triton.JITFunction, "run", record)
    return found


def meta(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def layer(scheme: str = "native") -> DeviceMoE:
    total = EXPERTS + SHARED
    gate_up, down = meta(total, 2 * INNER, WIDTH), meta(total, WIDTH, INNER)
    one_byte = None
    if scheme != "native":
        kind = torch.float8_e4m3fn if scheme.endswith("e4m3") else torch.int8
        one_byte = quant.QuantisedExperts(
            *(
                quant.QuantisedWeights(
                    meta(*w.shape, dtype=kind), meta(*w.shape[:2], dtype=torch.float32)
                )
                for w in (gate_up, down)
            )
        )
    native = scheme in ("native", "mixed_int8", "mixed_e4m3")
    stack = ExpertStack(
        scheme=scheme,
        gate_up=gate_up if native else None,
        down=down if native else None,
        quantised=one_byte,
    )
    return DeviceMoE(meta(EXPERTS, WIDTH), RouterConfig(top_k=K), stack, num_shared=SHARED)


def call(moe: DeviceMoE, num_tokens: int) -> torch.Tensor:
    workspace = moe.workspace(num_tokens, torch.bfloat16)
    mixed = moe.experts.scheme.startswith("mixed")
    formats = meta(num_tokens * (K + SHARED), dtype=torch.int8) if mixed else None
    return moe(meta(num_tokens, WIDTH), workspace, formats_U=formats)


@pytest.mark.parametrize("scheme", ["native", "w8a8", "w8a16", "e4m3", "mixed_int8", "mixed_e4m3"])
@pytest.mark.parametrize("num_tokens", [1, 33, 1000])
def test_a_layer_reads_nothing_back_and_sizes_every_launch_on_the_host(
    launches, scheme, num_tokens
):
    y = call(layer(scheme), num_tokens)
    assert y.shape == (num_tokens, WIDTH) and y.dtype == torch.bfloat16
    names = [launch.name for launch in launches]
    assert names.count("grouped_product") == 2, "one launch for each product, whatever the format"
    assert names[0] == "_route" and names[-1] == "_combine"
    for launch in launches:
        assert all(type(size) is int and size > 0 for size in launch.grid)
    many = num_tokens * (K + SHARED) > permute.QUADRATIC_PAIRS
    assert ("permute_quadratic" in names) != many and ("place_chunks" in names) == many


def test_replicas_and_a_captured_counter_read_nothing_back_either(launches):
    moe = layer("mixed_int8")
    workspace = moe.workspace(5, torch.bfloat16)
    permutation = permute.permute(workspace.ids_TK, EXPERTS + SHARED + 1, 16)
    stack_of = meta(EXPERTS + SHARED + 1, dtype=torch.int64)
    tiles = moe.workspace(5, torch.bfloat16).tiles
    formats = meta(5 * (K + SHARED), dtype=torch.int8)
    y = grouped_mlp(
        meta(5, WIDTH), permutation, moe.experts, tiles=tiles, formats_U=formats,
        stack_of_P=stack_of, scratch=workspace.scratch,
    )  # fmt: skip
    assert y.shape == (5 * (K + SHARED), WIDTH) and len(launches) >= 3
    with pytest.raises((RuntimeError, NotImplementedError)):
        workspace.read_counters()


def test_no_tokens_launch_nothing(launches):
    assert call(layer(), 0).shape == (0, WIDTH)
    assert not launches


def test_a_layer_that_reads_a_value_back_is_caught(launches, monkeypatch):
    original = permute.BlockedPermutation.num_rows.fget
    for read in (
        lambda value: value.item(),
        lambda value: value.tolist(),
        lambda value: value.cpu(),
        lambda value: torch.nonzero(value).shape,
        bool,
    ):

        def num_rows(self, read=read):
            read(original(self))
            return original(self)

        monkeypatch.setattr(permute.BlockedPermutation, "num_rows", property(num_rows))
        with pytest.raises((RuntimeError, NotImplementedError)):
            call(layer(), 5)


@pytest.mark.parametrize(("scheme", "num_tokens"), [("mixed_int8", 3), ("e4m3", 1000)])
def test_what_a_layer_launches_compiles_for_a_gpu(launches, scheme, num_tokens):
    call(layer(scheme), num_tokens)
    for launch in launches:
        compiled = inspector.compile_for(launch.variant(), inspector.chip("sm_90"))
        assert not compiled.resources.complaints(), launch.name
    assert len({launch.name for launch in launches}) >= 5


@pytest.mark.parametrize("fused", [True, False])
def test_combine_rounds_each_product_and_each_sum(fused):
    as_shipped = combine.variants()[0]
    assert not as_shipped.fp_fusion
    compiled = inspector.compile_for(replace(as_shipped, fp_fusion=fused), inspector.chip("sm_90"))
    assert ("FFMA" in compiled.sass()) == fused, "with fusion the check sees it"
