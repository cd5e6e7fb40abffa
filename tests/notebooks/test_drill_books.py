"""The books of drills: built like the others, and walked with and without a repair."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nbformat
import pytest

from tests.notebooks.books import DRILLS, path_of, read, run, said
from tests.notebooks.test_structure import code_of, faults_of, text_of
from workbench.drills.files import find

BOOKS = DRILLS[1:]
"""All but the quick reference, which starts no drill."""


def drill_of(name: str) -> str:
    (cell,) = [cell for cell in read(name).cells if cell.id == "parameters"]
    return re.search(r'drill = "([a-z-]+)"', cell.source)[1]


def test_there_is_a_reference_and_six_books_each_of_another_drill():
    assert [name[:3] for name in DRILLS] == [f"D0{n}" for n in range(7)]
    assert len({drill_of(name) for name in BOOKS}) == 6


@pytest.mark.parametrize("name", DRILLS)
def test_a_book_is_clean_and_in_canonical_form(name):
    assert faults_of(code_of(name)) == []
    raw = path_of(name).read_text(encoding="utf-8")
    assert raw == json.dumps(json.loads(raw), indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    for target in re.findall(r"\]\(([^)]+)\)", text_of(name)):
        assert (path_of(name).parent / target).exists(), target
    head = read(name).cells[0].source
    for part in ("**You will learn**", "| Prerequisites | ", "| Time | ", "| Last verified | "):
        assert part in head


@pytest.mark.parametrize("name", BOOKS)
def test_a_book_does_not_give_the_cause_or_the_repair_away_in_code(name):
    scenario = find(drill_of(name))
    sources = "\n".join(cell.source for cell in code_of(name))
    assert scenario.cause not in sources.replace(f'drill = "{scenario.id}"', "")
    assert "desk.act(" not in sources.replace("# desk.act(", "")
    assert read(name).cells[0].source.startswith(f"# {name[:3]} · {scenario.title}\n")


@pytest.mark.slow
def test_the_reference_runs_and_names_every_book():
    notebook = read(DRILLS[0])
    run(notebook)
    assert "| What people see |" in said(notebook, "reference")
    assert all(Path(path_of(name)).name in text_of(DRILLS[0]) for name in BOOKS)


@pytest.mark.parametrize("name", BOOKS)
def test_running_all_cells_of_a_book_hands_nothing_in(name):
    (cell,) = [cell for cell in read(name).cells if cell.id == "finish"]
    assert cell.source == "hand_in = False\n\nif hand_in:\n    desk.finish()"


def handed_in(name: str) -> nbformat.NotebookNode:
    """Return a book that hands in at its end."""
    notebook = read(name)
    for cell in notebook.cells:
        if cell.id == "finish":
            cell.source = cell.source.replace("hand_in = False", "hand_in = True")
    return notebook


@pytest.mark.slow
@pytest.mark.parametrize("name", BOOKS)
def test_a_book_handed_in_as_it_is_ends_restored_and_not_passed(name):
    notebook = handed_in(name)
    run(notebook)
    ending = said(notebook, "finish")
    assert "not passed" in ending and "The engine is restored:" in ending


@pytest.mark.slow
@pytest.mark.parametrize("name", BOOKS)
def test_a_book_with_cause_and_repair_filled_in_is_passed(name):
    scenario, notebook = find(drill_of(name)), handed_in(name)
    acts = [f"desk.act({act!r}, **{given!r})" for act, given in scenario.repairs[0].acts]
    for cell in notebook.cells:
        if cell.id == "diagnosis":
            cell.source = cell.source.replace('cause = ""', f"cause = {scenario.cause!r}")
        elif cell.id == "repair":
            cell.source = "\n".join(acts)
    run(notebook)
    assert "100 of 100: passed" in said(notebook, "finish")
    assert "The engine is restored:" in said(notebook, "finish")
