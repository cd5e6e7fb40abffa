"""From a model folder to a stream of assignments, one to one and checked before the first byte.

`engine.runtime` calls `read_config` and `assignments` and copies each tensor into its place. Every
tensor of the files is used exactly once and every parameter is covered; names, shapes and number
formats are all checked from the headers first, so that a wrong folder is refused at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.checkpoint.families import HEAD, Index, Place, closest_layout
from engine.checkpoint.files import member, model_folder, read_json
from engine.checkpoint.manifest import NAME as MANIFEST
from engine.checkpoint.manifest import verify
from engine.checkpoint.reader import CheckpointReader
from engine.config import ModelConfig
from engine.errors import CheckpointError

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHOWN_NAMES = 3
GENERATION = "generation_config.json"
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class Assignment:
    """`target[index] = tensor`, for one tensor of the files."""

    target: str
    """Name of our parameter."""
    index: Index
    """The part of it; `()` is all of it."""
    tensor: torch.Tensor
    """In the number format of the file."""


def read_config(folder: str | Path) -> ModelConfig:
    """Read the `config.json` of a model folder.

    Where a `generation_config.json` says which tokens end a text, it is right, as in transformers.

    Raises:
        CheckpointError: the folder or a file is missing or damaged.
        ConfigError: the model is one that this engine does not compute.
    """
    folder = model_folder(folder)
    raw = read_json(member(folder, "config.json"))
    if (folder / GENERATION).exists():
        eos = read_json(member(folder, GENERATION)).get("eos_token_id")
        if eos is not None:
            raw["eos_token_id"] = eos
    return ModelConfig.from_hf(raw)


def assignments(
    folder: str | Path,
    config: ModelConfig,
    *,
    hashes: bool = True,
    wanted: Callable[[str], bool] = lambda _: True,
) -> Iterator[Assignment]:
    """Check a model folder, then yield its tensors one by one, each with its place.

    The checks are done when this returns; bytes are read as the iterator advances, one tensor at a
    time. A folder with a manifest is verified against it (`hashes=False`: sizes only); without one,
    a changed byte inside a tensor cannot be seen. Only tensors whose target `wanted` accepts are
    read; all are checked.

    Raises:
        CheckpointError: the folder is damaged, or its tensors do not fit `config` one to one.
    """
    folder = model_folder(folder)
    if (folder / MANIFEST).exists():
        verify(folder, hashes=hashes)
    reader = CheckpointReader(folder)
    try:
        found = _fit(reader, config)
    except BaseException:
        reader.close()
        raise
    return _read(reader, found, wanted)


def check_fit(folder: str | Path, config: ModelConfig) -> None:
    """Hold a folder's names and shapes against `config`, reading no tensor and no manifest.

    Raises:
        CheckpointError: the folder is damaged, or its tensors do not fit `config` one to one.
    """
    with CheckpointReader(model_folder(folder)) as reader:
        _fit(reader, config)


def _read(
    reader: CheckpointReader, found: dict[str, Place], wanted: Callable[[str], bool]
) -> Iterator[Assignment]:
    with reader:
        for name in reader.names():
            if name in found:  # all but a tied head, which `_fit` has compared
                place = found[name]
                if wanted(place.target):
                    yield Assignment(place.target, place.index, reader.get(name))


def _fit(reader: CheckpointReader, config: ModelConfig) -> dict[str, Place]:
    """Return tensor name -> place after checking all names, shapes and number formats."""
    names = set(reader.names())
    if config.tie_word_embeddings and {HEAD.source, EMBEDDING} <= names:
        _check_tied_head(reader)
        names.remove(HEAD.source)
    layout, found = closest_layout(names, config)
    _check_names(reader.folder, f"{config.family} ({layout})", names, found)
    for name, place in found.items():
        if reader.shape(name) != place.shape:
            raise CheckpointError(
                f"{reader.path_of(name)}: tensor {name} has shape {reader.shape(name)}, but "
                f"config.json asks for {place.shape}; config and weights belong to two models."
            )
        if reader.dtype(name) not in WEIGHT_DTYPES:
            raise CheckpointError(
                f"{reader.path_of(name)}: tensor {name} is {reader.dtype(name)}, but only "
                f"{', '.join(str(dtype) for dtype in WEIGHT_DTYPES)} weights can be loaded."
            )
    return found


def _check_names(
    folder: Path, layout: str, names: Collection[str], wanted: Collection[str]
) -> None:
    """Refuse names that do not match one to one, and show the unmatched ones of both sides."""
    unknown, missing = sorted(set(names) - set(wanted)), sorted(set(wanted) - set(names))
    if unknown or missing:
        raise CheckpointError(
            f"{folder}: the tensor names do not fit {layout}: not known: {_shown(unknown)}; "
            f"not found: {_shown(missing)}."
        )


def _check_tied_head(reader: CheckpointReader) -> None:
    """Accept a saved head beside a tied embedding only if both are the same."""
    if not torch.equal(reader.get(HEAD.source), reader.get(EMBEDDING)):
        raise CheckpointError(
            f"{reader.path_of(HEAD.source)}: {HEAD.source} differs from {EMBEDDING} although "
            "config.json sets tie_word_embeddings; set it to false."
        )


def _shown(names: list[str]) -> str:
    """Return the first names and how many more there are, or 'none'."""
    more = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "") or "none"
