"""Imports point one way, the engine needs five libraries, and importing does no work.

The rules are read from the source, so that a lazy import inside a function counts as well; what
needs a process (what does `import engine` load?) runs in one. The last part feeds the checker
sources that break each rule.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("engine", "workbench", "dashboards")
"""Each may import itself and those before it."""

ENGINE_LAYERS = (
    "errors config events faults kernels routing exchange model train cluster runtime serve"
).split()
"""Each may import itself and those before it."""
BESIDE = {"checkpoint": ("errors", "config")}
"""Stand beside the layers: what they may import; `BESIDE_USERS` may import them."""
BESIDE_USERS = ("train", "cluster", "runtime", "serve")

CORE = {"torch", "triton", "numpy", "safetensors", "tokenizers"}
SERVICE = {"fastapi", "starlette", "pydantic", "jinja2", "uvicorn", "prometheus_client"} | {
    *("grpc", "grpc_health", "grpc_reflection", "google")
}
"""What `engine.serve` may import besides."""
LAZY = {
    "engine.train.corpus": {"lxml"},  # rebuilding the corpus from its packages, not using it
    "engine.checkpoint.store": {"fsspec"},  # object storage
}
"""Module or package -> libraries that it may import inside a function, and nowhere else."""

AT_IMPORT = {
    "os.environ": "reads the environment",
    "os.getenv": "reads the environment",
    "logging.basicConfig": "sets up logging",
    "warnings.filterwarnings": "changes the warnings of the whole process",
    "warnings.simplefilter": "changes the warnings of the whole process",
    "torch.cuda.": "asks for a GPU",
    "torch.set_": "changes torch for the whole process",
    "torch.manual_seed": "changes torch for the whole process",
}
"""Dotted name, or its beginning up to a `.` or `_`, that a module may not use while it is being
imported -> why not."""


@dataclass(frozen=True)
class Import:
    """One imported module, as it stands in a source."""

    name: str
    line: int
    lazy: bool
    """Inside a function, or for the type checker only."""


# --- the project itself ---------------------------------------------------------------------------


def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def test_the_three_packages_are_there() -> None:
    assert {name.split(".")[0] for name in MODULES} == set(PACKAGES)
    assert len(MODULES) > 30


@pytest.mark.parametrize("package", PACKAGES)
def test_no_import_breaks_a_rule(package: str) -> None:
    faults = [
        fault
        for module, path in MODULES.items()
        if module.split(".")[0] == package
        for fault in faults_of(module, path.read_text(encoding="utf-8"))
    ]
    assert not faults, "\n" + "\n".join(faults)


@pytest.mark.parametrize("module", ["engine", "engine.config", "engine.errors", "engine.faults"])
def test_the_light_modules_do_not_load_torch(module: str) -> None:
    loaded = json.loads(
        python(f"import sys, json, {module}; print(json.dumps(sorted(sys.modules)))")
    )
    assert module in loaded
    assert not {"torch", "triton", "tokenizers", "safetensors"} & set(loaded)


IMPORT_ALL = """
import importlib, json, logging, os, sys
sys.modules.update(dict.fromkeys({blocked!r}))
before = dict(os.environ)
import torch
threads = torch.get_num_threads(), torch.initial_seed()
for name in {names!r}:
    importlib.import_module(name)
print(json.dumps({{
    "cuda": torch.cuda.is_initialized(),
    "torch": threads != (torch.get_num_threads(), torch.initial_seed()),
    "logging": len(logging.getLogger().handlers),
    "environment": sorted(key for key, _ in set(os.environ.items()) ^ before.items()),
}}))
"""
IDLE = {"cuda": False, "torch": False, "logging": 0, "environment": []}
SET_BY_LIBRARIES = ["_PYVIZ_COMMS_INSTALLED"]
"""panel's own note to itself."""
EXTRAS = (
    "anywidget bokeh fastapi fsspec grpc ipywidgets lxml pandas panel plotly psutil ray"
).split()


def test_the_engine_and_the_benchmarks_import_with_the_core_libraries_alone() -> None:
    names = [
        name
        for name in importable()
        if (name.startswith("engine") and not name.startswith("engine.serve"))
        or name.startswith("workbench.bench")
    ]
    assert "engine.checkpoint.load" in names
    out = python(IMPORT_ALL.format(blocked=[*EXTRAS, "transformers", "yaml"], names=names))
    assert json.loads(out) == IDLE


def test_importing_every_module_does_no_work() -> None:
    found = json.loads(python(IMPORT_ALL.format(blocked=[], names=importable())))
    assert found == IDLE | {"environment": SET_BY_LIBRARIES}


def importable() -> list[str]:
    return [name for name in MODULES if not name.endswith("__main__")]


def python(source: str) -> str:
    # Other tests of this process may have set what importing sets.
    clean = {key: value for key, value in os.environ.items() if key not in SET_BY_LIBRARIES}
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- the rules ------------------------------------------------------------------------------------


def faults_of(module: str, source: str) -> list[str]:
    """Return one line for each rule that `source`, as the module of this name, breaks."""
    tree = ast.parse(source)
    found = []
    for item in imports(tree, module):
        reason = import_fault(module, item)
        if reason:
            found.append(f"{module}:{item.line} imports {item.name}: {reason}")
    for line, name, reason in work_at_import(tree):
        found.append(f"{module}:{line} uses {name} at import: {reason}")
    return found


def import_fault(module: str, item: Import) -> str | None:
    package, target = module.split(".")[0], item.name.split(".")[0]
    if target in PACKAGES:
        if PACKAGES.index(target) > PACKAGES.index(package):
            return f"{package} lies below {target}"
        return engine_fault(module, item.name) if package == "engine" else None
    if target in sys.stdlib_module_names or target in CORE:
        return None
    if package == "engine":
        if target in SERVICE and module.startswith("engine.serve"):
            return None
        for owner, libraries in LAZY.items():
            if within(module, owner) and target in libraries:
                return None if item.lazy else f"{target} may only be imported inside a function"
        return "engine needs only " + ", ".join(sorted(CORE))
    if within(module, "workbench.bench") and not item.lazy:
        return "workbench.bench imports no more than the engine at its top"
    return None


def engine_fault(module: str, target: str) -> str | None:
    if module == "engine":
        return None  # the public door, lazy (see the test of light modules)
    if target == "engine":
        return "the public door is for those outside; import the module itself"
    here, there = module.split(".")[1], target.split(".")[1]
    if here == there:
        return None
    if there in BESIDE:
        return None if here in BESIDE_USERS else f"{here} may not import {there}"
    if here in BESIDE:
        return None if there in BESIDE[here] else f"{here} stands on {BESIDE[here]} alone"
    if here not in ENGINE_LAYERS or there not in ENGINE_LAYERS:
        return f"{here} or {there} has no place among the layers"
    if ENGINE_LAYERS.index(there) > ENGINE_LAYERS.index(here):
        return f"{here} lies below {there}"
    return None


def within(module: str, owner: str) -> bool:
    return module == owner or module.startswith(owner + ".")


def imports(tree: ast.Module, module: str) -> Iterator[Import]:
    """Yield every import; `from engine import x` is `engine.x` where that is a module."""
    for node, lazy in walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, lazy)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: None if is_package(module) else -1]
                kept = package[: len(package) - (node.level - 1)]
                base = ".".join([*kept, *([base] if base else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield Import(full if full in MODULES else base, node.lineno, lazy)
        elif isinstance(node, ast.Call) and dotted(node.func).endswith(
            ("import_module", "__import__")
        ):
            if node.args and isinstance(node.args[0], ast.Constant):
                yield Import(str(node.args[0].value), node.lineno, lazy)


def is_package(module: str) -> bool:
    return MODULES.get(module, Path()).name == "__init__.py"


def work_at_import(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the name and the reason of everything `AT_IMPORT` forbids."""
    for node, lazy in walk(tree):
        if isinstance(node, ast.Attribute) and not lazy:
            name = dotted(node)
            for rule, reason in AT_IMPORT.items():
                if name == rule or (rule[-1] in "._" and name.startswith(rule)):
                    yield node.lineno, name, reason


def walk(node: ast.AST, lazy: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Yield every node with whether it is left alone while its module is imported.

    Bodies of functions are, and annotations, and what stands under `if TYPE_CHECKING` or
    `if __name__ == "__main__"`; decorators, default values and class bodies are not.
    """
    yield node, lazy
    for field, value in ast.iter_fields(node):
        later = lazy or field in ("annotation", "returns")
        if field == "body" and isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        ):
            later = True
        if field == "body" and isinstance(node, ast.If):
            condition = ast.unparse(node.test)
            later = lazy or condition.endswith("TYPE_CHECKING") or "__name__ ==" in condition
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from walk(child, later)


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


# --- negative controls: the checker sees each kind of fault ---------------------------------------

BROKEN = [
    ("engine.model.moe", "import workbench", "engine lies below workbench"),
    ("engine.model.moe", "from workbench.views import load", "engine lies below workbench"),
    ("workbench.cli", "def f():\n    import dashboards.app", "workbench lies below dashboards"),
    ("engine.kernels.topk", "from engine.routing.table import T", "kernels lies below routing"),
    ("engine.kernels.topk", "from engine import routing", "kernels lies below routing"),
    ("engine.kernels.topk", "from ..routing import table", "kernels lies below routing"),
    ("engine.routing.gate", "def f():\n    import engine.model", "routing lies below model"),
    ("engine.errors", "from engine import config", "errors lies below config"),
    ("engine.events", "import engine.faults", "events lies below faults"),
    (
        "engine.routing.gate",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from engine.model import moe",
        "routing lies below model",
    ),
    (
        "engine.routing.gate",
        "from importlib import import_module\nimport_module('engine.runtime')",
        "routing lies below runtime",
    ),
    ("engine.model.moe", "from engine import Engine", "the public door"),
    ("engine.model.moe", "import engine", "the public door"),
    ("engine.checkpoint.load", "from engine.events import Sink", "checkpoint stands on"),
    ("engine.model.moe", "import engine.checkpoint.load", "model may not import checkpoint"),
    ("engine.model.moe", "import engine.novelty", "has no place among the layers"),
    ("engine.model.moe", "import pandas", "engine needs only"),
    ("engine.model.moe", "def f():\n    import plotly.express", "engine needs only"),
    ("engine.runtime.engine", "import fastapi", "engine needs only"),
    ("engine.serve.api", "import panel", "engine needs only"),
    ("engine.train.corpus.build", "import lxml.etree", "only be imported inside a function"),
    ("engine.train.losses", "def f():\n    import lxml", "engine needs only"),
    ("workbench.bench.decode", "import pandas", "imports no more than the engine"),
    ("workbench.cli", "import os\nA = os.environ['A']", "reads the environment"),
    ("workbench.cli", "import os\nA = os.environ.get('A')", "reads the environment"),
    ("workbench.cli", "import os\ndef f(a=os.getenv('A')): ...", "reads the environment"),
    ("workbench.cli", "import logging\nlogging.basicConfig()", "sets up logging"),
    ("engine.config", "import torch\nGPU = torch.cuda.is_available()", "asks for a GPU"),
    (
        "engine.config",
        "import torch\nclass A:\n    n = torch.cuda.device_count()",
        "asks for a GPU",
    ),
    ("engine.config", "import torch\ntorch.set_num_threads(1)", "changes torch"),
    ("engine.config", "import warnings\nwarnings.simplefilter('ignore')", "changes the warnings"),
]

SOUND = [
    ("dashboards.app", "import panel, workbench.cli, engine.events"),
    ("workbench.cli", "import typer, engine"),
    ("engine.runtime.engine", "from engine.checkpoint import load\nfrom engine.model import moe"),
    ("engine.serve.api", "import fastapi\nfrom engine.runtime import engine"),
    ("engine.train.corpus.build", "def f():\n    import lxml.etree"),
    ("workbench.bench.decode", "import torch\ndef f():\n    import transformers"),
    ("engine.checkpoint.load", "from engine.errors import CheckpointError\nfrom . import reader"),
    ("engine.config", "import torch\ndef f():\n    return torch.cuda.is_available()"),
    ("engine.config", "import torch\ndef f(s: torch.cuda.Stream) -> torch.cuda.Event: ..."),
    ("workbench.cli", "import os\nif __name__ == '__main__':\n    print(os.environ)"),
]


@pytest.mark.parametrize(("module", "source", "reason"), BROKEN)
def test_a_source_that_breaks_a_rule_is_caught(module: str, source: str, reason: str) -> None:
    faults = faults_of(module, source)
    assert len(faults) == 1, faults
    assert reason in faults[0]


@pytest.mark.parametrize(("module", "source"), SOUND)
def test_a_sound_source_passes(module: str, source: str) -> None:
    assert faults_of(module, source) == []


def test_work_at_import_is_seen_by_the_process_check() -> None:
    source = IMPORT_ALL.format(blocked=[], names=["logging.config"]).replace(
        "print(", "logging.basicConfig(); os.environ['WORK'] = '1'; torch.manual_seed(5)\nprint("
    )
    assert json.loads(python(source)) == {
        "cuda": False,
        "torch": True,
        "logging": 1,
        "environment": ["WORK"],
    }


def test_a_blocked_library_cannot_be_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL.format(blocked=["pandas"], names=["pandas"])],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "import of pandas halted" in done.stderr
