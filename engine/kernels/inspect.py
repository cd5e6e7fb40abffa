"""What a Triton kernel becomes on a GPU, found out without one.

Compiles a `Variant` for a named chip and reads the result: the compiler's stages, the machine code,
registers, spills, shared memory and tensor-core instructions. Uses the assembler and disassemblers
that Triton brings, and its cache (`TRITON_CACHE_DIR`, else Triton's default). Refuses a process in
which kernels are interpreted. Called by `workbench kernels show` and by the tests' compile matrix.
"""

from __future__ import annotations

import pkgutil
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engine.errors import ConfigError, MachineError, nearest
from engine.kernels.gpu.variant import Variant

STAGES = ("ttir", "ttgir", "ptx", "sass", "resources")


@dataclass(frozen=True, kw_only=True, slots=True)
class Chip:
    """A GPU to compile for, and what one thread block may use on it."""

    name: str
    backend: str
    """Triton's: `cuda` or `hip`."""
    arch: int | str
    warp_size: int
    shared_limit_bytes: int
    """Most shared memory of one thread block."""
    source: str
    """Where the limit is published."""


_CUDA = "CUDA C++ Programming Guide, technical specifications per compute capability"
_CDNA3 = "AMD CDNA 3 white paper, local data share of a compute unit"

CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        name: Chip(
            name=name,
            backend=backend,
            arch=arch,
            warp_size=warp,
            shared_limit_bytes=kilobytes << 10,
            source=source,
        )
        for name, backend, arch, warp, kilobytes, source in (
            ("sm_80", "cuda", 80, 32, 163, _CUDA),
            ("sm_90", "cuda", 90, 32, 227, _CUDA),
            ("sm_100", "cuda", 100, 32, 227, _CUDA),
            ("gfx942", "hip", "gfx942", 64, 64, _CDNA3),
        )
    }
)

TENSOR_CORE = re.compile(
    r"(?<!\.)\b(?:[A-Z]+MMA(?:\.[\w.]+)?"  # machine code: HMMA, HGMMA, UTCHMMA, …
    r"|(?:wgmma\.mma_async|tcgen05\.mma|mma\.sync)[\w.:]*"  # PTX
    r"|v_s?mfmac?_\w+)"  # gfx942
)
_LOCAL = {"spill_loads": re.compile(r"\bLDL\b"), "spill_stores": re.compile(r"\bSTL\b")}


@dataclass(frozen=True, slots=True)
class Resources:
    """What one thread, or one thread block, takes."""

    registers: int
    """Of one thread."""
    stack_bytes: int
    """Of one thread in slow local memory; anything above 0 means that registers ran out."""
    shared_bytes: int
    shared_limit_bytes: int
    tensor_memory_columns: int
    """Of 512 on sm_100; 0 elsewhere."""

    def complaints(self) -> list[str]:
        """Name every budget that is exceeded."""
        found = []
        if self.stack_bytes:
            found.append(f"spills {self.stack_bytes} bytes a thread")
        if self.shared_bytes > self.shared_limit_bytes:
            found.append(f"shared memory {self.shared_bytes} > {self.shared_limit_bytes} bytes")
        if self.tensor_memory_columns > 512:
            found.append(f"tensor memory {self.tensor_memory_columns} > 512 columns")
        return found


@dataclass(frozen=True, slots=True)
class Compiled:
    """A variant compiled for a chip."""

    variant: Variant
    chip: Chip
    texts: Mapping[str, str]
    """Stage -> text: `ttir`, `ttgir`, `llir`, then `ptx` or `amdgcn`."""
    binary: bytes
    resources: Resources

    @property
    def assembly(self) -> str:
        """The last stage that is text: PTX, or the machine code of gfx942."""
        return self.texts["ptx" if self.chip.backend == "cuda" else "amdgcn"]

    def sass(self) -> str:
        """Disassemble the machine code; takes about a second on NVIDIA's chips.

        Raises:
            MachineError: the disassembler failed.
        """
        if self.chip.backend != "cuda":
            return self.assembly
        return _tool("nvdisasm", ["-c"], self.binary)

    def text(self, stage: str) -> str:
        """Return a stage of `STAGES` that is text; `ptx` is the machine code's text on gfx942."""
        if stage == "sass":
            return self.sass()
        return self.assembly if stage == "ptx" else self.texts[stage]


def tensor_core_instructions(text: str) -> dict[str, int]:
    """Count the tensor-core instructions in PTX or machine code, by their full name."""
    return dict(Counter(TENSOR_CORE.findall(text)).most_common())


def spills(sass: str) -> dict[str, int]:
    """Count loads from and stores to local memory in an NVIDIA chip's machine code."""
    return {name: len(pattern.findall(sass)) for name, pattern in _LOCAL.items()}


def chip(name: str) -> Chip:
    """Return the chip of this name.

    Raises:
        ConfigError: it is unknown; the nearest is named.
    """
    if name not in CHIPS:
        raise ConfigError(f"target {name!r} is not one of {', '.join(CHIPS)}{nearest(name, CHIPS)}")
    return CHIPS[name]


def refusal(variant: Variant, on: Chip) -> str | None:
    """Say why a variant is not shipped for a chip, or return None when it is."""
    if on.backend == "cuda":
        if int(on.arch) < variant.min_capability:
            return f"{variant.name} needs sm_{variant.min_capability} or later"
    elif "*fp8e4nv" in variant.signature.values():
        return f"{variant.name} needs NVIDIA's e4m3; {on.name} has another one"
    return None


def shipped() -> dict[str, tuple[Variant, ...]]:
    """Return module name -> its variants, for every kernel module beside `variant.py`.

    Raises:
        MachineError: Triton is not installed, or this process interprets kernels.
    """
    require_compiler()
    package = import_module("engine.kernels.gpu")
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    modules = {name: import_module(f"engine.kernels.gpu.{name}") for name in names}
    return {name: m.variants() for name, m in modules.items() if hasattr(m, "variants")}


def require_compiler() -> None:
    """Refuse a machine or a process that cannot compile.

    Raises:
        MachineError: Triton is not installed, or this process interprets kernels.
    """
    if find_spec("triton") is None:
        raise MachineError(
            "triton is not installed, so kernels cannot be compiled; it has wheels for Linux only."
        )
    knobs: Any = import_module("triton").knobs
    if knobs.runtime.interpret:
        raise MachineError(
            "TRITON_INTERPRET is set, so kernels of this process are interpreted, not compiled;"
            " unset it and run again."
        )


def compile_for(variant: Variant, on: Chip) -> Compiled:
    """Compile a variant for a chip.

    Raises:
        ConfigError: the variant is not shipped for this chip.
        MachineError: Triton is not installed, this process interprets kernels, or a tool failed.
    """
    if why := refusal(variant, on):
        raise ConfigError(f"{why}; {on.name} was asked for.")
    require_compiler()
    triton: Any = import_module("triton")
    backends: Any = import_module("triton.backends.compiler")
    compiler: Any = import_module("triton.compiler")
    source = compiler.ASTSource(
        variant.kernel, dict(variant.signature), dict(variant.constexprs), _alignment(variant)
    )
    compiled = triton.compile(
        source,
        target=backends.GPUTarget(on.backend, on.arch, on.warp_size),
        options={
            "num_warps": variant.num_warps,
            "num_stages": variant.num_stages,
            "enable_fp_fusion": variant.fp_fusion,
        },
    )
    texts = {name: text for name, text in compiled.asm.items() if isinstance(text, str)}
    binary = bytes(compiled.asm["cubin" if on.backend == "cuda" else "hsaco"])
    measure = _cuda_usage if on.backend == "cuda" else _hip_usage
    registers, stack = measure(binary, texts)
    return Compiled(
        variant,
        on,
        MappingProxyType(texts),
        binary,
        Resources(
            registers=registers,
            stack_bytes=stack,
            shared_bytes=int(compiled.metadata.shared),
            shared_limit_bytes=on.shared_limit_bytes,
            tensor_memory_columns=int(getattr(compiled.metadata, "tmem_size", 0) or 0),
        ),
    )


def _alignment(variant: Variant) -> dict[tuple[int, ...], list[list[Any]]]:
    """Mark what the launcher would find to be a multiple of 16: pointers, and what is `aligned`."""
    return {
        (place,): [["tt.divisibility", 16]]
        for place, (name, kind) in enumerate(variant.signature.items())
        if kind.startswith("*") or name in variant.aligned
    }


def _cuda_usage(binary: bytes, _: Mapping[str, str]) -> tuple[int, int]:
    """Return registers and stack bytes of one thread, as the assembler noted them."""
    noted = _tool("cuobjdump", ["-res-usage"], binary)
    registers, stack = (
        max(map(int, re.findall(rf"{name}:(\d+)", noted)), default=-1) for name in ("REG", "STACK")
    )
    assert min(registers, stack) >= 0, f"cuobjdump named no registers: {noted!r}"
    return registers, stack


def _hip_usage(_: bytes, texts: Mapping[str, str]) -> tuple[int, int]:
    def noted(name: str) -> int:
        match = re.search(rf"\.{name}:\s+(\d+)", texts["amdgcn"])
        assert match, f"the assembly names no {name}"
        return int(match.group(1))

    spilled = 4 * (noted("vgpr_spill_count") + noted("sgpr_spill_count"))
    return noted("vgpr_count"), max(spilled, noted("private_segment_fixed_size"))


def _tool(name: str, words: list[str], binary: bytes) -> str:
    """Run a tool that Triton brings on a binary and return what it prints."""
    knobs: Any = import_module("triton").knobs
    tool = getattr(knobs.nvidia, name).path
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(binary)
        done = subprocess.run(
            [str(tool), *words, str(path)], capture_output=True, text=True, check=False
        )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise MachineError(f"{name} failed on a compiled kernel: {lines[-1]}")
    return done.stdout
