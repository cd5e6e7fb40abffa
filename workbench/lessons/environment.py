"""The first cell of every notebook: is everything here? One sentence for each thing that is not.

Imports nothing of the extras at its top, because they may be what is missing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator

from engine.errors import WorkbenchError
from workbench import paths
from workbench.lessons.note import Note

OLDEST_PYTHON = (3, 11)
PACKAGES = ("torch", "numpy", "pandas", "plotly", "anywidget", "ipywidgets")
MEND = "run `make install` in the checkout and open the lesson with `make lab`"


def check_environment(model: str = paths.DEFAULT_MODEL) -> Note:
    """Say what is missing for the lessons, one sentence each, or that everything is here."""
    found = list(problems(model))
    if found:
        return Note("\n".join(f"- **✗** {sentence}" for sentence in found))
    version = ".".join(map(str, sys.version_info[:3]))
    torch = importlib.metadata.version("torch")
    return Note(f"**✓** Everything is here: Python {version}, torch {torch}, the model `{model}`.")


def problems(model: str = paths.DEFAULT_MODEL) -> Iterator[str]:
    """Yield one sentence for each thing the lessons need and do not find."""
    if sys.version_info < OLDEST_PYTHON:
        have, need = (".".join(map(str, v)) for v in (sys.version_info[:2], OLDEST_PYTHON))
        yield f"This is Python {have}, the lessons need {need} or later; {MEND}."
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        yield f"{', '.join(missing)} cannot be imported; {MEND}."
    kernel = _version("ipykernel")
    if kernel is not None and not (7, 2) <= kernel < (7, 4):
        shown = importlib.metadata.version("ipykernel")
        yield (
            f"ipykernel is {shown}, with which widgets lose what you do to them; "
            "`pip install 'ipykernel>=7.2,<7.4'` and restart the kernel."
        )
    try:
        paths.model_folder(model)
        paths.data("corpus")
    except WorkbenchError as wrong:
        yield f"{str(wrong)[:1].upper()}{str(wrong)[1:]}"


def _version(package: str) -> tuple[int, ...] | None:
    """Return a package's major and minor version, None when it is not installed."""
    try:
        words = importlib.metadata.version(package).split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return None
    return tuple(int(word) for word in words if word.isdigit())
