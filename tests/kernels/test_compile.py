"""Every shipped kernel compiles for real GPUs within its budget, with the instructions it needs.

`make test` compiles the largest tile of every product and format for sm_90, where registers are
scarcest and the wide instructions must show, and one kernel of each kind elsewhere; the rest of the
matrix is marked slow. No tile is shipped for gfx942: there kernels only have to compile, to its
matrix instructions. That the checks can fail is shown below and in test_inspect.py.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from engine.kernels import inspect
from engine.kernels.offsets import narrow_products
from tests.kernels.samples import centred_variant, gathered_variant, product_variant

WGMMA = {"bf16": {"HGMMA"}, "fp16": {"HGMMA"}, "fp8": {"QGMMA"}, "int8": {"IGMMA"}}
"""Operands -> sm_90's tensor-core instruction for a whole warpgroup."""
ASSEMBLY = {
    "sm_80": {"mma"},
    "sm_90": {"wgmma"},
    "sm_100": {"tcgen05", "mma"},  # blocks too small for tcgen05 fall back to mma
    "gfx942": {"v_mfma"},
}


def matrix():
    """Every (variant, chip) that is shipped; all but a few are marked slow."""
    for module, variants in inspect.shipped().items():
        for name, chip in inspect.CHIPS.items():
            seen = set()
            # Small tiles come first, masked after whole.
            for variant in variants if chip.backend == "hip" else reversed(variants):
                if inspect.refusal(variant, chip):
                    continue
                kind = stands_for(module, variant, name)
                again = kind in seen or variant.dtype == "fp16"  # its code is that of bf16
                marks = [pytest.mark.slow] if again else []
                if not again:
                    seen.add(kind)
                yield pytest.param(variant, chip, marks=marks, id=f"{variant.name}-{name}")


def stands_for(module, variant, chip):
    """What a variant is an example of: one of each is compiled in `make test`."""
    if chip != "sm_90":
        one_of = variant.dtype if variant.needs_tensor_cores else ""
        return (chip, module, one_of if one_of in ("bf16", "fp8") else "")
    if variant.needs_tensor_cores:
        return (chip, module, *variant.name.split(".")[:2])
    return (chip, module, variant.kernel.__name__)


def faults(compiled):
    """Everything about a compiled variant that must not be."""
    variant, chip = compiled.variant, compiled.chip
    found = compiled.resources.complaints() if chip.backend == "cuda" else []
    found += [f"32-bit offset: {product}" for product in narrow_products(compiled.texts["ttir"])]
    if variant.needs_tensor_cores:
        used = {name.split(".")[0] for name in inspect.tensor_core_instructions(compiled.assembly)}
        if chip.backend == "hip":
            used = {"v_mfma" for name in used if name.startswith("v_mfma")}
        if not used & ASSEMBLY[chip.name]:
            found.append(f"no {' or '.join(sorted(ASSEMBLY[chip.name]))}, only {sorted(used)}")
    return found


@pytest.mark.parametrize(("variant", "chip"), list(matrix()))
def test_a_shipped_kernel_keeps_to_its_budget(variant, chip):
    assert faults(inspect.compile_for(variant, chip)) == []


def by_dtype():
    """The largest tile of each format that runs on tensor cores; the rest are marked slow."""
    seen = set()
    for variants in inspect.shipped().values():
        for variant in reversed(variants):
            if variant.needs_tensor_cores:
                again = variant.dtype in seen or variant.dtype == "fp16"
                marks = [pytest.mark.slow] if again else []
                seen.add(variant.dtype)
                yield pytest.param(variant, marks=marks, id=variant.name)


@pytest.mark.parametrize("variant", list(by_dtype()))
def test_the_machine_code_for_sm_90_shows_the_wide_instruction_and_no_spill(variant):
    sass = inspect.compile_for(variant, inspect.chip("sm_90")).sass()
    assert {name.split(".")[0] for name in inspect.tensor_core_instructions(sass)} >= WGMMA[
        variant.dtype
    ]
    assert inspect.spills(sass) == {"spill_loads": 0, "spill_stores": 0}


def test_every_product_in_a_narrow_format_is_held_to_tensor_cores():
    products = [v for v in inspect.shipped()["grouped_gemm"] if v.dtype != "fp32"]
    assert len(products) > 20 and all(variant.needs_tensor_cores for variant in products)


# --- negative controls: a kernel for each way to be wrong ----------------------------------------

WRONG = [
    (centred_variant(16384), "spills"),
    (product_variant(sizes={"N": 64, "K": 128}, num_stages=8), "shared memory"),
    (product_variant(stride="i32"), "32-bit offset"),
    (gathered_variant(False), "32-bit offset"),
    (product_variant(operand="fp32", sizes={"M": 16, "N": 16, "K": 16}), "no wgmma"),
    (product_variant(num_warps=2), "no wgmma"),
]


@pytest.mark.parametrize(("variant", "fault"), WRONG, ids=[fault for _, fault in WRONG])
def test_a_kernel_that_is_wrong_in_one_way_is_caught(variant, fault):
    found = faults(inspect.compile_for(variant, inspect.chip("sm_90")))
    assert len({text.split(":")[0] for text in found}) == 1, found
    assert found[0].startswith(fault)


def test_a_kernel_that_is_right_has_no_fault():
    for name in inspect.CHIPS:
        assert faults(inspect.compile_for(product_variant(), inspect.chip(name))) == []
