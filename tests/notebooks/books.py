"""The notebooks, and how the tests run them."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

from workbench import paths
from workbench.lessons.exercises import BY_NOTEBOOK

FOLDER = paths.root() / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("[0-9]*.ipynb"))
DRILLS = sorted(path.stem for path in FOLDER.glob("D*.ipynb"))
"""The books of drills, which have no exercises but their own."""


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(path_of(name), as_version=4)


def path_of(name: str) -> Path:
    return FOLDER / f"{name}.ipynb"


def solve(notebook: nbformat.NotebookNode, name: str) -> None:
    """Put the solutions in place of the blanks."""
    solutions = {blank_id(found.name): found.solution.strip() for found in BY_NOTEBOOK[name]}
    for cell in notebook.cells:
        cell.source = solutions.get(cell.id, cell.source)


def blank_id(exercise: str) -> str:
    return f"blank-{exercise.replace(' ', '-')}"


def run(notebook: nbformat.NotebookNode) -> None:
    """Run every cell as JupyterLab would, in a kernel that starts in the notebook's folder."""
    place = {"metadata": {"path": str(FOLDER)}}
    NotebookClient(notebook, timeout=110, kernel_name="python3", resources=place).execute()


def said(notebook: nbformat.NotebookNode, cell_id: str) -> str:
    """Return what a cell put out, as plain text."""
    (cell,) = [cell for cell in notebook.cells if cell.id == cell_id]
    return "\n".join(
        output.get("text") or output.get("data", {}).get("text/plain", "")
        for output in cell.outputs
    )
