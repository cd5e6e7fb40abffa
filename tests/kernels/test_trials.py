"""Which way the experts' products take: what is measured, and when a fixed rule stands instead."""

from __future__ import annotations

import pytest
import torch

from engine.kernels import cpu_experts, registry, trials, ways
from engine.kernels.registry import Target, bind
from engine.kernels.ways import Plan
from tests.numerics import close

RULE = Plan("packed", "columns", 4)
SLOW = [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]


def matrix(kind, out=96, inner=64):
    generator = torch.Generator().manual_seed(0)
    if kind == "int8":
        values = torch.randint(-127, 128, (out, inner), generator=generator, dtype=torch.int8)
        return values, torch.rand(out, generator=generator)
    return torch.randn(out, inner, generator=generator).to(getattr(torch, kind)), None


@pytest.mark.parametrize("rows", [1, 2, 7, 33])
@pytest.mark.parametrize(
    ("kind", "name"), [(kind, way.name) for kind, several in ways.WAYS.items() for way in several]
)
def test_every_way_that_this_machine_has_multiplies_rightly(kind, name, rows):
    way = ways.named(kind, name)
    if (missing := way.missing()) is not None:
        assert name not in [one.name for one in ways.candidates(kind, 1)] and len(missing) > 10
        return
    weights, scales = matrix(kind)
    x, _ = matrix(kind, rows)
    out = way.make(weights, scales).product(x)
    wanted = x.double() @ weights.double().t()
    if kind == "int8":
        assert out.dtype == torch.float32
        assert close(out, wanted * scales.double(), 2e-6), "whole numbers are summed exactly"
        return
    assert out.dtype == x.dtype
    assert close(out, wanted, 1e-5 if kind == "float32" else 2e-2)
    assert not close(out.roll(1, -1), wanted, 2e-2), "the check sees swapped channels"


def test_a_processor_with_vnni_or_amx_multiplies_int8_in_a_fast_way():
    amx = torch.cpu._is_amx_tile_supported()
    if amx or torch.cpu._is_vnni_supported():
        name = "signed" if amx else "unsigned"
        assert ways.candidates("int8", 1)[0].name == name, ways.named("int8", name).missing()


def test_a_way_that_overflows_is_not_offered():
    def half_the_sum(values_OI, scales_O):
        wide = values_OI.float().t()
        return ways.Multiplied(lambda x: (x.float() @ wide).clamp(-32768, 32767) * scales_O, 0)

    assert ways._wrong_int8(ways._widened) is None
    assert "overflow" in ways._wrong_int8(half_the_sum)


def test_the_fastest_plan_is_the_least_time_over_all_numbers_of_rows():
    seconds = {"packed": SLOW, "columns": [0.9] * 6, "half": [0.5, 0.5, 0.5, 2.0, 2.0, 2.0]}
    found = trials.best(seconds, RULE, 2)
    assert found[:3] == ("columns", "half", 8)
    gain = (0.5 / 0.9) ** (2 / 6) * (0.5 / 1.0) ** (1 / 6) * 0.9 ** (3 / 6)
    assert found.reason == (
        f"measured with 2 threads: {1 / gain:.2f} x as fast as the fixed rule (columns below 4 "
        "rows, packed from there on)"
    )


def test_what_is_hardly_faster_leaves_the_rule_in_force():
    seconds = {"packed": SLOW, "columns": [0.93] * 6}
    found = trials.best(seconds, RULE, 1)
    assert found[:3] == RULE[:3] and "nothing is clearly faster" in found.reason
    assert trials.best(seconds | {"columns": [0.8] * 6}, RULE, 1).main == "columns"


def test_a_busy_machine_is_not_believed():
    calm = [{"packed": [1.0] * 6}] * 4
    assert trials.steady(calm)
    assert not trials.steady(calm[: trials.LEAST - 1]), "too few rounds"
    shaken = [{"packed": [(1 + n) * (1 + n)] * 6} for n in range(4)]
    assert not trials.steady(shaken)
    one_bad_round = [*calm[:3], {"packed": [9.0] * 6}]
    assert trials.steady(one_bad_round)


def test_a_trial_is_made_once_a_size_and_number_of_threads_and_ends_in_time(monkeypatch):
    made = []
    real = trials._measure
    monkeypatch.setattr(trials, "_measure", lambda *args: made.append(args) or real(*args))
    trials._plan.cache_clear()
    for _ in range(3):
        plan = trials.plan("bfloat16", 96, 64)
        assert plan.main in {way.name for way in ways.candidates("bfloat16", 96 * 64)}
    assert len(made) == 1
    trials._plan.cache_clear()
    monkeypatch.setattr(trials, "BUDGET_S", 0.0)
    plan = trials.plan("bfloat16", 96, 64)
    assert plan[:3] == ways.fixed("bfloat16", 96 * 64)[:3] and "too busy" in plan.reason
    trials._plan.cache_clear()


def test_experts_are_measured_only_when_the_target_says_so(monkeypatch):
    asked = []
    monkeypatch.setattr(trials, "plan", lambda *args: asked.append(args) or Plan("packed"))
    stacks = torch.ones(2, 64, 32).bfloat16(), torch.ones(2, 32, 32).bfloat16()
    options = {"device": "cpu", "dtype": "bfloat16", "deterministic": False}
    bind(Target(**options)).prepare_experts(*stacks)
    assert not asked
    bind(Target(**options, measure=True)).prepare_experts(*stacks)
    assert asked == [("bfloat16", 64, 32), ("bfloat16", 32, 32)]
    exact = Target(device="cpu", dtype="float32", deterministic=True, measure=True)
    assert bind(exact).prepare_experts is None, "deterministic mode never measures"
    small = Target(device="cpu", dtype="float32", deterministic=False, measure=True)
    assert bind(small).prepare_experts is cpu_experts.prepare_columns
    assert len(asked) == 2


def test_the_table_tells_what_was_measured_for_which_matrices(monkeypatch):
    plan = Plan("packed", "half", 4, "measured with 2 threads: 1.40 x as fast")
    monkeypatch.setattr(trials, "plan", lambda *_: plan)
    options = {"device": "cpu", "dtype": "bfloat16", "deterministic": False}
    row = _experts(Target(**options, measure=True))
    assert "half below 4 rows, packed from there on" in row.reason
    assert "1024 x 1024" in row.reason and "measured with 2 threads: 1.40 x" in row.reason
    assert "half" not in _experts(Target(**options)).reason


def _experts(target):
    rows = registry.table(target)
    return next(row for row in rows if row.op == "grouped_mlp" and row.name == "packed")
