"""Files that people write: read as YAML, held against a JSON schema, and against what exists.

Demos and drills are such files. Nothing runs before all of it is valid; every fault is one sentence
that names the place, and an unknown word names the nearest known one.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from engine.errors import ConfigError, MachineError, nearest


def named(kind: str, name: str, folder: Path) -> Path:
    """Return the YAML file in `folder` that is called `name`.

    Raises:
        ConfigError: there is none; the message calls it a `kind` and names the nearest.
    """
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in known:
        raise ConfigError(
            f"unknown {kind} {name!r}{nearest(name, known)} known {kind}s: {', '.join(known)}."
        )
    return folder / f"{name}.yaml"


def read_yaml(path: Path) -> Any:
    """Return what a YAML file holds.

    Raises:
        ConfigError: it cannot be read.
        MachineError: PyYAML is missing.
    """
    yaml = _library("yaml")
    try:
        # The same loader in C, where it was built: all drills are read in half the time.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        return yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as wrong:
        raise ConfigError(f"{path.name} cannot be read: {wrong}.") from None


def schema_faults(raw: Any, schema: Path) -> Iterator[str]:
    """Yield what breaks the JSON schema in the file `schema`, one sentence each.

    Raises:
        MachineError: jsonschema is missing.
    """
    rules = json.loads(schema.read_text(encoding="utf-8"))
    validator = _library("jsonschema").Draft202012Validator(rules)
    for error in sorted(validator.iter_errors(raw), key=lambda error: error.json_path):
        place = error.json_path.removeprefix("$").removeprefix(".") or "the file"
        if error.validator == "additionalProperties":
            known = list(error.schema["properties"])
            for key in sorted(set(map(str, error.instance)) - set(known)):
                yield f"{place}: unknown key {key!r}{nearest(key, known)}"
        else:
            yield f"{place}: {error.message}."


def call_faults(
    kind: str,
    name: str,
    arguments: Mapping[str, Any],
    known: Mapping[str, Callable[..., Any]],
    given: int = 1,
) -> Iterator[str]:
    """Yield what is wrong with a call that a file makes.

    Args:
        kind: what such a function is called in the file.
        name: the function's name there.
        arguments: the arguments there, by name.
        known: what may be called.
        given: how many first arguments come from the caller and not from the file.
    """
    if name not in known:
        yield f"unknown {kind} {name!r}{nearest(name, known)} known: {', '.join(known)}."
        return
    signature = inspect.signature(known[name])
    parameters = list(signature.parameters)[given:]
    for argument in arguments:
        if argument not in parameters:
            yield f"{kind} {name}: unknown argument {argument!r}{nearest(argument, parameters)}"
            return
    try:
        signature.bind(*(None,) * given, **arguments)
    except TypeError as wrong:
        yield f"{kind} {name}: {wrong}."


def _library(name: str) -> Any:
    """Import a library of the extra `ui`.

    Raises:
        MachineError: it is missing.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise MachineError(
            f"reading demos and drills needs {name}; install the extra with "
            "`pip install -e '.[ui]'`."
        ) from None
