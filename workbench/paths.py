"""Where the bundled models and data are: beside the packages, in the checkout.

Used by the command line and the benchmarks; nothing is read when this module is imported.
"""

from __future__ import annotations

from pathlib import Path

from engine.errors import CheckpointError, ConfigError, MachineError

DEFAULT_MODEL = "polyglot-moe"


def root() -> Path:
    """Return the checkout: the folder that holds the packages."""
    return Path(__file__).resolve().parents[1]


def data(*parts: str) -> Path:
    """Return a path under `data/` that exists.

    Raises:
        MachineError: it does not, as in an install that is no checkout.
    """
    path = root().joinpath("data", *parts)
    if not path.exists():
        raise MachineError(
            f"{path} does not exist; run from a complete checkout, or name your own files instead."
        )
    return path


def bundled_models() -> tuple[str, ...]:
    """Return the names of the models under `data/models`."""
    folder = root() / "data" / "models"
    return tuple(sorted(config.parent.name for config in folder.glob("*/config.json")))


def model_folder(name: str | Path) -> Path:
    """Return the folder of a model given as a path or as the name of a bundled one.

    Raises:
        CheckpointError: there is no such folder.
        ConfigError: the name is empty.
        MachineError: it is the default model's name and the checkout lacks it.
    """
    if not str(name):
        raise ConfigError(
            f"model ({name!r}) must be a folder with config.json, or one of the bundled models: "
            f"{', '.join(bundled_models()) or 'none here'}."
        )
    path = Path(name)
    if path.is_dir():
        return path
    if str(name) in bundled_models():
        return root() / "data" / "models" / str(name)
    if str(name) == DEFAULT_MODEL:
        raise MachineError(
            f"the bundled model is missing from {root() / 'data' / 'models'}; "
            "run from a complete checkout, or pass --model DIR."
        )
    if path.exists():
        raise CheckpointError(f"model {name} is not a folder; pass a folder with config.json.")
    raise CheckpointError(
        f"model folder {name} does not exist; pass a folder with config.json, or one of the "
        f"bundled models: {', '.join(bundled_models()) or 'none here'}."
    )
