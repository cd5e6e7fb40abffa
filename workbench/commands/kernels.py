"""`workbench kernels`: what runs each operation and why, and what a kernel compiles to."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby, zip_longest
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.errors import ConfigError, nearest
from workbench.options import JsonOption
from workbench.output import print_json

if TYPE_CHECKING:
    from engine.kernels.gpu.variant import Variant
    from engine.kernels.inspect import Chip

app = typer.Typer(help="The registry of kernels, and what each compiles to.")

DEVICES = ("cpu", "cuda")
DTYPES = ("float32", "bfloat16", "float16")
DTYPES_WIDTH, LEAST_REASON, GAP = 10, 20, 2
"""Characters of the table's columns, and between them."""
MODULES = {"grouped_mlp": "grouped_gemm", "mlp": "grouped_gemm", "quantise_rows": "quant"}
"""Operations whose kernels are in a module of another name."""
SHOWN = 4
"""Names of further variants that a person gets to see."""
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@app.callback(invoke_without_command=True)
def kernels(
    context: typer.Context,
    *,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; without it, both.")] = None,
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES) + ".")] = "float32",
    deterministic: Annotated[bool, typer.Option(help="The choices of deterministic mode.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List every operation's implementations: the one taken, and why the others are passed over."""
    if context.invoked_subcommand is not None:
        return
    from engine.kernels.registry import Target, table

    _one_of("device", device or "cpu", DEVICES)
    _one_of("dtype", dtype, DTYPES)
    rows = [
        asdict(row)
        for name in ([device] if device else DEVICES)
        for row in table(
            Target(device=name, dtype=dtype, deterministic=deterministic, measure=True)
        )
    ]
    if as_json:
        print_json({"dtype": dtype, "deterministic": deterministic, "rows": rows})
    else:
        _show_table(rows, shutil.get_terminal_size((80, 0)).columns)


@app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A kernel module, as grouped_gemm.")],
    *,
    target: Annotated[str, typer.Option(help="sm_80, sm_90, sm_100 or gfx942.")] = "sm_90",
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16, fp16, fp8 or int8; without it, any.")
    ] = None,
    variant: Annotated[
        str | None, typer.Option(help="A variant by name; without it, the first that fits.")
    ] = None,
    stage: Annotated[str, typer.Option(help="ttir, ttgir, ptx, sass or resources.")] = "resources",
    as_json: JsonOption = False,
) -> None:
    """Show what a Triton kernel compiles to for a GPU; none is needed."""
    from workbench.bench.machine import require_triton

    require_triton()
    from engine.kernels import inspect

    chip = inspect.chip(target)
    _one_of("stage", stage, inspect.STAGES)
    name = MODULES.get(name, name)
    variants = _variants(name)
    fitting = _fitting(name, variants, chip, SHORT.get(dtype or "", dtype))
    chosen = fitting[0] if variant is None else _named(variant, variants)
    compiled = inspect.compile_for(chosen, chip)
    report: dict[str, Any] = {"name": name, "variant": chosen.name, "target": target}
    report |= {"dtype": chosen.dtype, "stage": stage}
    if stage == "resources":
        sass = compiled.sass()
        report["resources"] = (
            asdict(compiled.resources)
            | inspect.spills(sass)
            | {"tensor_core_instructions": inspect.tensor_core_instructions(sass)}
            | {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
        )
        report["variants"] = [one.name for one in fitting]
    else:
        report["text"] = compiled.text(stage)
    if as_json:
        print_json(report)
    elif stage == "resources":
        _show_resources(report, chip)
    else:
        print(report["text"])


def _variants(name: str) -> tuple[Variant, ...]:
    from engine.kernels.inspect import shipped

    modules = shipped()
    known = name.replace("-", "_")
    if known not in modules:
        raise ConfigError(
            f"kernel {name!r} is not one of {', '.join(modules)}{nearest(name, modules)}"
        )
    return modules[known]


def _fitting(
    name: str, variants: tuple[Variant, ...], chip: Chip, dtype: str | None
) -> list[Variant]:
    """Return the variants of this format that are shipped for this chip, at least one."""
    from engine.kernels.inspect import refusal

    dtypes = sorted({one.dtype for one in variants})
    if dtype is not None:
        _one_of("dtype", dtype, tuple(dtypes))
    wanted = [one for one in variants if dtype in (None, one.dtype)]
    fitting = [one for one in wanted if refusal(one, chip) is None]
    if not fitting:
        raise ConfigError(
            f"{name} in {dtype} is not shipped for {chip.name}: {refusal(wanted[0], chip)}."
        )
    return fitting


def _named(variant: str, variants: tuple[Variant, ...]) -> Variant:
    by_name = {one.name: one for one in variants}
    if variant not in by_name:
        some = ", ".join(list(by_name)[:6]) + (", …" if len(by_name) > 6 else "")
        raise ConfigError(f"variant {variant!r} is not one of {some}{nearest(variant, by_name)}")
    return by_name[variant]


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(
            f"--{option} ({value}) must be one of {', '.join(allowed)}{nearest(value, allowed)}"
        )


def _show_table(rows: list[dict[str, Any]], width: int) -> None:
    """Print one line for each implementation, `*` before the one taken; reasons are folded.

    Args:
        rows: of `registry.table`, one device behind the other.
        width: of the terminal, in characters.
    """
    op_width = max(len(row["op"]) for row in rows)
    name_width = max(len("kernel"), *(len(row["name"]) for row in rows))
    widths = (1, op_width, name_width, DTYPES_WIDTH)
    reason_width = max(LEAST_REASON, width - sum(widths) - GAP * len(widths))
    for device, several in groupby(rows, key=itemgetter("device")):
        print(f"on {device}")
        _print_folded(("", "op", "kernel", "dtype", "reason"), (*widths, reason_width))
        before = ""
        for row in several:
            mark, op = "*" if row["taken"] else "", row["op"] if row["op"] != before else ""
            cells = (mark, op, row["name"], row["dtypes"], row["reason"])
            _print_folded(cells, (*widths, reason_width))
            before = row["op"]
        print()
    print("* is taken; where two of one operation are, the reason says which for what")


def _print_folded(cells: Sequence[str], widths: Sequence[int]) -> None:
    """Print a table's row on as many lines as its longest cell needs."""
    folded = [textwrap.wrap(cell, width) for cell, width in zip(cells, widths, strict=True)]
    for parts in zip_longest(*folded, fillvalue=""):
        line = (part.ljust(width) for part, width in zip(parts, widths, strict=True))
        print((" " * GAP).join(line).rstrip())


def _show_resources(report: dict[str, Any], chip: Chip) -> None:
    found = report["resources"]
    used = found.pop("tensor_core_instructions")
    print(f"{report['name']}  {report['variant']}  for {report['target']}\n")
    print(f"registers a thread      {found['registers']}")
    spilled = f"{found['spill_loads']} loads, {found['spill_stores']} stores"
    print(f"spills                  {spilled}, {found['stack_bytes']} bytes a thread")
    print(f"shared memory           {found['shared_bytes']} of {found['shared_limit_bytes']} bytes")
    if found["tensor_memory_columns"]:
        print(f"tensor memory           {found['tensor_memory_columns']} of 512 columns")
    print(f"warps, stages           {found['num_warps']}, {found['num_stages']}")
    names = [f"{number} x {name}" for name, number in used.items()]
    print("tensor-core products    " + ("\n" + " " * 24).join(names or ["none"]))
    print(f"\nlimit of shared memory: {chip.source}")
    others = [name for name in report["variants"] if name != report["variant"]]
    if others:
        more = f", … ({len(others) - SHOWN} more: --json)" if len(others) > SHOWN else ""
        print("other variants: " + ", ".join(others[:SHOWN]) + more)
