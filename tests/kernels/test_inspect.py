"""The inspector tells right kernels from wrong ones; it is what the compile matrix leans on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from engine.errors import ConfigError, MachineError
from engine.kernels import inspect
from engine.kernels.offsets import narrow_products
from tests.kernels.samples import centred_variant, gathered_variant, product_variant

ROOT = Path(__file__).parents[2]


def compiled(variant, name="sm_90"):
    return inspect.compile_for(variant, inspect.chip(name))


def kinds(text):
    return {name.split(".")[0] for name in inspect.tensor_core_instructions(text)}


@pytest.mark.parametrize(
    ("operand", "name", "assembly", "machine"),
    [
        ("bf16", "sm_80", "mma", "HMMA"),
        ("bf16", "sm_90", "wgmma", "HGMMA"),
        ("fp8e4nv", "sm_90", "wgmma", "QGMMA"),
        ("bf16", "sm_100", "tcgen05", "UTCHMMA"),
    ],
)
def test_tensor_core_instructions_are_found_in_assembly_and_machine_code(
    operand, name, assembly, machine
):
    result = compiled(product_variant(operand=operand), name)
    assert result.resources.complaints() == []
    assert kinds(result.assembly) == {assembly}
    sass = result.sass()
    assert machine in kinds(sass)
    assert inspect.spills(sass) == {"spill_loads": 0, "spill_stores": 0}


def test_gfx942_compiles_to_matrix_instructions():
    result = compiled(product_variant(), "gfx942")
    assert result.resources.complaints() == [] and result.resources.registers > 0
    assert any(name.startswith("v_mfma") for name in kinds(result.sass()))


def test_every_stage_is_text():
    result = compiled(product_variant())
    heads = {stage: result.text(stage) for stage in ("ttir", "ttgir", "ptx", "sass")}
    assert "tt.dot" in heads["ttir"] and "ttng.warp_group_dot" in heads["ttgir"]
    assert ".target sm_90a" in heads["ptx"] and "EXIT" in heads["sass"]


def test_a_product_without_tensor_cores_shows_none():
    scalar = product_variant(operand="fp32", sizes={"M": 16, "N": 16, "K": 16})
    result = compiled(scalar)
    assert inspect.tensor_core_instructions(result.assembly) == {}
    assert inspect.tensor_core_instructions(result.sass()) == {}


def test_a_spill_is_a_complaint_and_shows_in_the_machine_code():
    assert compiled(centred_variant(1024)).resources.complaints() == []
    result = compiled(centred_variant(16384))
    (complaint,) = result.resources.complaints()
    assert complaint.startswith("spills ")
    assert min(inspect.spills(result.sass()).values()) > 0


def test_too_much_shared_memory_is_a_complaint():
    deep = product_variant(sizes={"N": 64, "K": 128}, num_stages=8)
    (complaint,) = compiled(deep).resources.complaints()
    assert complaint.endswith("> 232448 bytes")


def test_offsets_that_could_overflow_are_named():
    assert narrow_products(compiled(product_variant()).texts["ttir"]) == []
    narrow = narrow_products(compiled(product_variant(stride="i32")).texts["ttir"])
    assert len(narrow) >= 2 and all("i32" in product for product in narrow)


def test_widening_after_the_product_is_too_late():
    assert narrow_products(compiled(gathered_variant(True)).texts["ttir"]) == []
    (narrow,) = narrow_products(compiled(gathered_variant(False)).texts["ttir"])
    assert "%chosen" in narrow


CARRIED = """
tt.func public @k(%p: !tt.ptr<f32>, %stride: i32, %n: i32) {
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  %end = scf.for %i = %c0 to %n step %c1 iter_args(%at = %c0) -> (i32) : i32 {
    %q = tt.addptr %p, %at : !tt.ptr<f32>, i32
    %next = arith.muli %i, %stride : i32
    scf.yield %next : i32
  }
  tt.return
}
"""


def test_a_product_that_a_loop_carries_to_an_address_is_named():
    assert narrow_products(CARRIED) == ["arith.muli %i, %stride : i32"]
    assert narrow_products(CARRIED.replace("scf.yield %next", "scf.yield %c1")) == []


@pytest.mark.parametrize(("constant", "found"), [(1024, 0), (1025, 1)])
def test_a_product_with_a_block_size_may_stay_narrow(constant, found):
    carried = CARRIED.replace("%c1 = arith.constant 1", f"%stride = arith.constant {constant}")
    assert len(narrow_products(carried)) == found


def test_addresses_that_cannot_be_followed_are_refused():
    with pytest.raises(ValueError, match="cannot be followed"):
        narrow_products("%d = tt.make_tensor_descriptor %p, [%n], [%s] : <f32>")


def test_an_unknown_target_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'sm_90'"):
        inspect.chip("sm90")


def test_fp8_is_refused_where_the_chip_has_none():
    fp8 = product_variant("tile.fp8", operand="fp8e4nv")
    for name in ("sm_80", "gfx942"):
        with pytest.raises(ConfigError, match=name):
            compiled(fp8, name)


INTERPRETED = """
from engine.errors import MachineError
from engine.kernels import inspect
try:
    inspect.shipped()
except MachineError as wrong:
    print(wrong)
"""


def test_an_interpreting_process_is_told_so_in_one_sentence():
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        cwd=ROOT,
        env={"TRITON_INTERPRET": "1", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("TRITON_INTERPRET is set") and done.stderr == ""


def test_a_machine_without_triton_is_told_so(monkeypatch):
    monkeypatch.setattr(inspect, "find_spec", lambda name: None)
    with pytest.raises(MachineError, match="triton is not installed"):
        inspect.shipped()
