"""A row's bits in deterministic mode do not depend on its neighbours, and elsewhere they may."""

from __future__ import annotations

import pytest
import torch

from engine.kernels import dense, tiled
from engine.kernels.registry import OPERATIONS, Target, bind, choose, kernels
from engine.kernels.router import RouterConfig

TOP_2 = RouterConfig.softmax(2, renormalise=True)
SIZES = [1, 2, 4, 12, 16, 17, 40, 100]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rows_alike(fn, x):
    """Whether the first rows come out bitwise equal at every batch size, also when permuted."""
    alone = torch.cat([fn(x[i : i + 1]) for i in range(3)])
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(3))
    for size in SIZES:
        part = order[:size]
        out = fn(x[part])
        for place, row in enumerate(part.tolist()):
            if row < 3 and not torch.equal(out[place], alone[row]):
                return False
    return all(torch.equal(fn(x[:size])[0], alone[0]) for size in SIZES)


def inputs():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, 256, generator=generator)
    w = torch.randn(768, 256, generator=generator)
    gate_up, down = (
        torch.randn(512, 256, generator=generator) / 16,
        torch.randn(256, 256, generator=generator) / 16,
    )
    return x, w, gate_up, down


def test_tiled_rows_are_bitwise_independent_of_the_batch():
    x, w, gate_up, down = inputs()
    assert rows_alike(lambda rows: tiled.linear(rows, w), x)
    assert rows_alike(lambda rows: tiled.rms_norm(rows, w[0], 1e-6), x)
    assert rows_alike(lambda rows: tiled.mlp(rows, gate_up, down), x)
    assert rows_alike(lambda rows: tiled.topk(rows[:, :8], TOP_2).scores_TE, x)


def test_the_check_fails_for_the_plain_product():
    x, w, _, _ = inputs()
    assert not rows_alike(lambda rows: dense.linear(rows, w), x)


def test_deterministic_mode_binds_the_tiled_paths_and_says_why():
    fast = bind(Target(device="cpu", dtype="float32", deterministic=False))
    exact = bind(Target(device="cpu", dtype="float32", deterministic=True))
    assert fast.linear is dense.linear and exact.linear is tiled.linear
    assert exact.attention is tiled.paged_attention
    reasons = {choice.op: choice.reason for choice in exact.reasons}
    assert "deterministic mode is on" in reasons["linear"]
    assert set(reasons) == set(OPERATIONS)


def test_every_operation_has_an_implementation_for_every_mode():
    for op in OPERATIONS:
        for deterministic in (True, False):
            target = Target(device="cpu", dtype="float32", deterministic=deterministic)
            assert choose(op, target).op == op
    assert {kernel.op for kernel in kernels()} == set(OPERATIONS)
