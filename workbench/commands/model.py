"""`workbench model`: look into a model folder and prove it whole."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated, Any

import typer

from workbench import paths
from workbench.options import JsonOption
from workbench.output import print_json, size

app = typer.Typer(help="Inspect and verify model folders.", no_args_is_help=True)

FolderArgument = Annotated[
    str, typer.Argument(metavar="[DIR]", help="Model folder, or the name of a bundled model.")
]


@app.command()
def inspect(folder: FolderArgument = paths.DEFAULT_MODEL, as_json: JsonOption = False) -> None:
    """Show a model's shape and tensors without reading its weights."""
    report = inspection(folder)
    if as_json:
        print_json(report)
    else:
        _show(report)


@app.command()
def verify(folder: FolderArgument = paths.DEFAULT_MODEL, as_json: JsonOption = False) -> None:
    """Check every file's hash and that tensors and parameters fit one to one."""
    from engine.checkpoint.load import assignments, read_config
    from engine.checkpoint.manifest import verify as verify_hashes

    path = paths.model_folder(folder)
    manifest = verify_hashes(path)
    num_tensors = sum(1 for _ in assignments(path, read_config(path)))
    report: dict[str, Any] = {
        "model": str(path),
        "status": "ok",
        "files": len(manifest.files),
        "bytes": sum(file.bytes for file in manifest.files.values()),
        "tensors": num_tensors,
    }
    if as_json:
        print_json(report)
    else:
        print(
            f"{path}: {report['files']} files, {size(report['bytes'])}, hashes right; "
            f"{num_tensors} tensors, one to one with the model's parameters"
        )


def inspection(folder: str) -> dict[str, Any]:
    """Return a model's shape, tensors and parameter counts.

    `active_parameters` are those one token meets: all but the experts it does not choose.
    """
    from dataclasses import asdict
    from math import prod

    from engine.checkpoint.load import read_config
    from engine.checkpoint.reader import CheckpointReader

    path = paths.model_folder(folder)
    config = read_config(path)
    with closing(CheckpointReader(path)) as reader:
        tensors: list[dict[str, Any]] = [
            {
                "name": name,
                "shape": list(reader.shape(name)),
                "dtype": str(reader.dtype(name)).removeprefix("torch."),
            }
            for name in reader.names()
        ]
    total = sum(prod(tensor["shape"]) for tensor in tensors)
    of_experts = sum(prod(t["shape"]) for t in tensors if ".experts." in t["name"])
    idle = of_experts * (1 - config.top_k / config.num_experts) if config.is_moe else 0
    return {
        "model": str(path),
        "config": asdict(config),
        "parameters": total,
        "active_parameters": int(total - idle),
        "tensors": tensors,
    }


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_row(Text("model", style="bold"), Text(report["model"]))
    for name, value in report["config"].items():
        table.add_row(Text(name, style="bold"), Text(str(value)))
    table.add_row(Text("parameters", style="bold"), f"{report['parameters']:,}")
    table.add_row(Text("active per token", style="bold"), f"{report['active_parameters']:,}")
    console.print(table)
    tensors = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("tensors", "shape", "dtype"):
        tensors.add_column(name)
    for pattern, (number, tensor) in _grouped(report["tensors"]).items():
        times = f"  x {number}" if number > 1 else ""
        tensors.add_row(
            Text(pattern + times),
            " x ".join(str(length) for length in tensor["shape"]) or "scalar",
            tensor["dtype"],
        )
    console.print()
    console.print(tensors)


def _grouped(tensors: list[dict[str, Any]]) -> dict[str, tuple[int, dict[str, Any]]]:
    """Return name pattern -> (how many, the first), with `*` for layer and expert numbers."""
    import re

    groups: dict[str, tuple[int, dict[str, Any]]] = {}
    for tensor in tensors:
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", tensor["name"])
        number, first = groups.get(pattern, (0, tensor))
        groups[pattern] = (number + 1, first)
    return groups
