"""The notebooks run from top to bottom, as they are and with every exercise solved."""

from __future__ import annotations

import pytest

from tests.notebooks.books import NAMES, blank_id, read, run, said, solve
from workbench.lessons.exercises import BY_NOTEBOOK


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_as_it_is_and_says_what_is_still_empty(name):
    notebook = read(name)
    run(notebook)
    assert said(notebook, "environment").startswith("**✓** Everything is here")
    for number in (1, 2, 3):
        assert said(notebook, f"check-{number}").startswith("○ Not yet. ")


@pytest.mark.parametrize(
    "name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])]
)
def test_a_notebook_runs_with_its_exercises_solved_and_every_check_passes(name):
    notebook = read(name)
    solve(notebook, name)
    run(notebook)
    for number, found in enumerate(BY_NOTEBOOK[name], start=1):
        assert said(notebook, f"check-{number}").startswith("✓ Pass. "), found.name
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            # Files go into the repository without outputs; what a reader saves stays small too.
            assert len(str(output)) < 200_000, cell.id
            assert output.get("name") != "stderr", f"{cell.id}: {output}"
    assert blank_id(BY_NOTEBOOK[name][0].name) in [cell.id for cell in notebook.cells]
