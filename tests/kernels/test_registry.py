"""What is chosen for a device, a format and a size, and the reason that goes with it."""

from __future__ import annotations

import pytest

from engine.errors import MachineError
from engine.kernels import cpu_experts, grouped_gemm, onednn, registry
from engine.kernels.registry import OPERATIONS, SMALL_MATRIX, Target, bind, choose, table


def target(**options):
    return Target(**{"device": "cpu", "dtype": "float32", "deterministic": False} | options)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"expert_bytes": SMALL_MATRIX}, "columns"),
        ({"expert_bytes": SMALL_MATRIX + 1}, "packed"),
        ({"dtype": "bfloat16", "expert_bytes": 1}, "packed"),
        ({"scheme": "w8a8"}, "int8"),
        ({"scheme": "w8a8", "dtype": "bfloat16"}, "int8"),
        ({"deterministic": True}, "tiled"),
    ],
)
def test_experts_are_chosen_by_format_and_size(options, name):
    assert choose("grouped_mlp", target(**options)).name == name


def test_a_choice_names_all_that_were_passed_over_and_why():
    choice = choose("grouped_mlp", target(expert_bytes=SMALL_MATRIX + 1))
    assert "triton passed over: is for GPUs" in choice.reason
    assert "int8 passed over: changes the numbers" in choice.reason
    assert "columns passed over: packed is faster for matrices above 2 MB" in choice.reason


def test_what_is_bound_brings_what_makes_its_weights():
    fast, exact = bind(target()), bind(target(deterministic=True))
    assert fast.prepare_experts is cpu_experts.prepare_columns and fast.prepare_linear is not None
    assert exact.prepare_experts is None and exact.prepare_linear is None


def test_without_onednn_the_plain_experts_run_and_int8_is_refused_in_a_sentence(monkeypatch):
    monkeypatch.setattr(onednn, "missing", lambda dtype: "this build of torch has no oneDNN")
    choice = choose("grouped_mlp", target(dtype="bfloat16"))
    assert choice.fn is grouped_gemm.grouped_mlp and "no oneDNN" in choice.reason
    with pytest.raises(MachineError, match=r"no implementation of grouped_mlp runs here: .*oneDNN"):
        bind(target(scheme="w8a8"))


def test_without_triton_a_gpu_takes_the_torch_paths_and_nothing_fails_to_import(monkeypatch):
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    choice = choose("topk", target(device="cuda"))
    assert choice.name == "torch" and "triton is not installed" in choice.reason


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_table_takes_one_implementation_of_each_operation_for_each_size(device, dtype):
    rows = table(target(device=device, dtype=dtype))
    assert {row.op for row in rows} == set(OPERATIONS)
    for op in OPERATIONS:
        taken = [row.name for row in rows if row.op == op and row.taken]
        both_sizes = op == "grouped_mlp" and device == "cpu" and dtype == "float32"
        assert len(taken) == (2 if both_sizes else 1), (op, taken)
    assert all(row.reason for row in rows)


def test_the_table_of_a_known_size_takes_what_choose_takes():
    for size in (1, SMALL_MATRIX + 1):
        one = target(expert_bytes=size)
        for row in table(one):
            assert row.taken == (choose(row.op, one).name == row.name)
