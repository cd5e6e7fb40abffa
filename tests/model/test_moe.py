"""One MoE layer as a whole, in every way it can run, against the oracle."""

from __future__ import annotations

import pytest
import torch

from engine.config import ModelConfig
from engine.exchange.dispatch import LocalDispatcher
from engine.faults import Faults
from engine.kernels import reference
from engine.kernels.attention import plan_attention
from engine.kernels.registry import Target, bind
from engine.model.moe import MoE
from engine.model.parts import Parts
from engine.model.step import HostRows, StageClock, StepContext
from engine.routing.placement import contiguous
from tests.numerics import close
from tests.routing.test_table import replicated

WAYS = [(deterministic, devices) for deterministic in (False, True) for devices in (1, 2)]


def layer(deterministic=False, **options):
    config = ModelConfig(
        family="qwen3_moe",
        vocab_size=8,
        hidden_size=32,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=32,
        intermediate_size=16,
        moe_intermediate_size=16,
        num_experts=4,
        top_k=2,
        **options,
    )
    ops = bind(Target(device="cpu", dtype="float32", deterministic=deterministic))
    faults = Faults()
    moe = MoE(config, 0, Parts(ops=ops, faults=faults, dispatcher=LocalDispatcher(ops, faults)))
    generator = torch.Generator().manual_seed(0)
    for parameter in moe.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return moe


def context(num_tokens, table):
    none = torch.zeros(num_tokens, dtype=torch.int64)
    return StepContext(
        host=HostRows(*[none.numpy()] * 5),
        token_ids_T=none,
        positions_T=none,
        slots_T=none,
        homes_T=torch.arange(num_tokens) % table.num_devices,
        plan=plan_attention([], 16, torch.device("cpu")),
        table=table,
        policies=(None,),
        clock=StageClock(),
        records=[],
    )


def expected(moe, x, *, renormalise, scale):
    logits = x.double() @ moe.gate.weight.double().T
    ids, weights = reference.topk_softmax(logits, 2, renormalise=renormalise)
    return reference.moe(x, ids, weights * scale, moe.experts.gate_up, moe.experts.down)


@pytest.mark.parametrize(("deterministic", "devices"), WAYS)
@pytest.mark.parametrize(("renormalise", "scale"), [(True, 1.0), (False, 1.0), (False, 2.5)])
def test_scale_and_renormalising_are_applied_once_in_every_mode(
    deterministic, devices, renormalise, scale
):
    moe = layer(deterministic, norm_topk_prob=renormalise, routed_scaling_factor=scale)
    x = torch.randn(19, 32, generator=torch.Generator().manual_seed(1))
    table = contiguous(1, 4, devices)
    y = moe(x, context(19, table))
    assert close(y, expected(moe, x, renormalise=renormalise, scale=scale), 2e-5)
    assert not close(y, expected(moe, x, renormalise=not renormalise, scale=scale), 2e-5)
    assert not close(y, expected(moe, x, renormalise=renormalise, scale=scale * scale + 1), 2e-5)


@pytest.mark.parametrize("deterministic", [False, True])
def test_replicas_change_where_rows_run_and_nothing_else(deterministic):
    moe = layer(deterministic)
    x = torch.randn(19, 32, generator=torch.Generator().manual_seed(1))
    step = context(19, replicated())
    y = moe(x, step)
    assert set(step.records[0].phy_ids_TK.flatten().tolist()) > {0, 5}
    plain = moe(x, context(19, contiguous(1, 4, 2)))
    assert torch.equal(y, plain) if deterministic else close(y, plain, 1e-6)


@pytest.mark.parametrize("deterministic", [False, True])
def test_no_tokens_go_through_and_launch_nothing(deterministic, monkeypatch):
    moe = layer(deterministic)
    launched = []
    monkeypatch.setattr("torch.nn.functional.silu", lambda x: launched.append(x) or x)
    y = moe(torch.empty(0, 32), context(0, contiguous(1, 4, 2)))
    assert y.shape == (0, 32) and y.dtype == torch.float32
    assert not [x for x in launched if x.numel()]


@pytest.mark.parametrize("deterministic", [False, True])
def test_five_tokens_on_one_expert_of_eight_run_there_only(deterministic):
    moe = layer(deterministic)
    moe.gate.weight.data[:] = 0
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    step = context(5, contiguous(1, 4, 2))
    y = moe(x, step)
    assert step.records[0].phy_ids_TK.tolist() == [[0, 1]] * 5
    assert close(y, expected(moe, x, renormalise=True, scale=1.0), 2e-5)
