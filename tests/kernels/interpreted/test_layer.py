"""The whole layer on the device's kernels: gate, choice, order, experts and sum."""

from __future__ import annotations

import pytest
import torch

from engine.errors import KernelError
from engine.kernels import quant, reference
from engine.kernels.gpu.experts import ExpertStack
from engine.kernels.gpu.layer import DeviceMoE, capture, gate_logits
from engine.kernels.router import RouterConfig
from tests.numerics import close

WIDTH, INNER, EXPERTS, K = 32, 16, 6, 2
ROUTER = RouterConfig(top_k=K, renormalise=True)


def weights(num_shared=0):
    generator = torch.Generator().manual_seed(5)
    gate = torch.randn(EXPERTS, WIDTH, generator=generator)
    total = EXPERTS + num_shared
    gate_up = torch.randn(total, 2 * INNER, WIDTH, generator=generator) * WIDTH**-0.5
    down = torch.randn(total, WIDTH, INNER, generator=generator) * INNER**-0.5
    return gate, gate_up, down


def tokens(count):
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(count))


def expected(x, gate, gate_up, down, *, num_shared=0):
    ids, routing = reference.topk_softmax(x.double() @ gate.double().t(), K, renormalise=True)
    shared = torch.arange(EXPERTS, EXPERTS + num_shared).expand(len(x), -1)
    ones = torch.ones(len(x), num_shared, dtype=torch.float64)
    return reference.moe(
        x, torch.cat((ids, shared), 1), torch.cat((routing, ones), 1), gate_up, down
    )


def run(layer, x):
    """Run with every array that is not yet written poisoned."""
    workspace = layer.workspace(len(x), x.dtype)
    workspace.scratch.inner_NF.fill_(float("nan"))
    workspace.scratch.out_ND.fill_(float("nan"))
    workspace.y_TD.fill_(float("nan"))
    return layer(x, workspace)


@pytest.mark.parametrize("num_shared", [0, 2])
def test_a_layer_equals_the_oracle_with_and_without_shared_experts(num_shared):
    gate, gate_up, down = weights(num_shared)
    stack = ExpertStack(scheme="native", gate_up=gate_up, down=down)
    layer = DeviceMoE(gate, ROUTER, stack, num_shared=num_shared)
    x = tokens(9)
    y = run(layer, x)
    assert close(y, expected(x, gate, gate_up, down, num_shared=num_shared), 1e-5)
    if num_shared:
        without = expected(x, gate, gate_up, down)
        assert not close(y, without, 1e-5), "a layer without its shared expert would be seen"


def test_a_workspace_serves_one_batch_after_another():
    gate, gate_up, down = weights(1)
    layer = DeviceMoE(
        gate, ROUTER, ExpertStack(scheme="native", gate_up=gate_up, down=down), num_shared=1
    )
    workspace = layer.workspace(5, torch.float32)
    for x in (tokens(5), -tokens(5)):
        y = layer(x, workspace)
        assert close(y, expected(x, gate, gate_up, down, num_shared=1), 1e-5)


def test_no_tokens_give_no_rows():
    gate, gate_up, down = weights()
    for scheme in ("native", "w8a8"):
        one_byte = quant.quantise_experts(gate_up, down, "int8") if scheme == "w8a8" else None
        stack = ExpertStack(scheme=scheme, gate_up=gate_up, down=down, quantised=one_byte)
        y = run(DeviceMoE(gate, ROUTER, stack), tokens(0))
        assert y.shape == (0, WIDTH) and y.dtype == torch.float32


def test_logits_are_fp32_whatever_the_rows_are():
    gate, x = weights()[0].bfloat16(), tokens(4).bfloat16()
    logits = gate_logits(x, gate)
    assert logits.dtype == torch.float32
    assert close(logits, x.double() @ gate.double().t(), 1e-5)


def test_what_does_not_fit_is_refused():
    gate, gate_up, down = weights()
    stack = ExpertStack(scheme="native", gate_up=gate_up, down=down)
    with pytest.raises(KernelError, match=r"gate_weight_ED is \(6, 32\) .* must be \(5, 32\)"):
        DeviceMoE(gate, ROUTER, stack, num_shared=1)
    with pytest.raises(KernelError, match=r"k \(7\) must be 1 to 6"):
        DeviceMoE(gate, RouterConfig(top_k=7), stack)
    layer = DeviceMoE(gate, ROUTER, stack)
    workspace = layer.workspace(4, torch.float32)
    with pytest.raises(KernelError, match=r"x_TD is \(3, 32\) .* must be \(4, 32\)"):
        layer(tokens(3), workspace)
    with pytest.raises(KernelError, match=r"x_TD is \(4, 32\) bfloat16"):
        layer(tokens(4).bfloat16(), workspace)
    with pytest.raises(KernelError, match=r"only a layer on a GPU can be captured"):
        capture(layer, 4, torch.float32)


def test_a_workspace_counts_what_was_wrong_in_the_last_call():
    gate, gate_up, down = weights(1)
    stack = ExpertStack(scheme="native", gate_up=gate_up, down=down)
    layer = DeviceMoE(gate, ROUTER, stack, num_shared=1)
    workspace = layer.workspace(4, torch.float32)
    x = tokens(4)
    x[1, 0] = x[3, 5] = float("nan")
    layer(x, workspace)
    assert workspace.read_counters() == {"bad_rows": 2, "bad_ids": 0}
    workspace.ids_TK[:3, K] = EXPERTS + 1  # where the shared expert's id stands for good
    layer(tokens(4), workspace)
    assert workspace.read_counters() == {"bad_rows": 0, "bad_ids": 3}
    assert int(workspace.bad_ids) == 3 and workspace.bad_rows.shape == ()


def test_counts_below_none_and_a_workspace_of_another_layer_are_refused():
    gate, gate_up, down = weights()
    stack = ExpertStack(scheme="native", gate_up=gate_up, down=down)
    with pytest.raises(KernelError, match=r"num_shared \(-1\) must be 0 or more"):
        DeviceMoE(gate, ROUTER, stack, num_shared=-1)
    layer = DeviceMoE(gate, ROUTER, stack)
    with pytest.raises(KernelError, match=r"num_tokens \(-1\) must be 0 or more"):
        layer.workspace(-1, torch.float32)
    other = DeviceMoE(gate, RouterConfig(top_k=3), stack).workspace(4, torch.float32)
    with pytest.raises(KernelError, match=r"workspace.ids_TK is \(4, 3\) .* must be \(4, 2\)"):
        layer(tokens(4), other)
