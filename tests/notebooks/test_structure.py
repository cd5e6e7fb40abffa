"""How every notebook is built, read from its file without running it."""

from __future__ import annotations

import ast
import json
import re
import shlex

import pytest
import typer

from tests.notebooks.books import NAMES, blank_id, path_of, read
from workbench.commands import app
from workbench.lessons.exercises import BY_NOTEBOOK

ALLOWED = {"workbench", "engine", "numpy", "pandas"}
"""What a cell may import at its top."""


def code_of(name: str) -> list:
    return [cell for cell in read(name).cells if cell.cell_type == "code"]


def text_of(name: str) -> str:
    return "\n".join(cell.source for cell in read(name).cells if cell.cell_type == "markdown")


def faults_of(cells: list) -> list[str]:
    """Return what is wrong with code cells: outputs, counts, classes, magics, foreign imports."""
    found = []
    for cell in cells:
        if cell.outputs or cell.execution_count is not None:
            found.append(f"{cell.id}: has been run; clear its outputs")
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.ClassDef):
                found.append(f"{cell.id}: defines a class; put it into workbench.lessons")
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            foreign = [each for each in names if each.split(".")[0] not in ALLOWED]
            found += [f"{cell.id}: imports {each}" for each in foreign]
        if any(len(line) > 96 for line in cell.source.splitlines()):
            found.append(f"{cell.id}: a line is longer than 96 columns: JupyterLab would cut it")
    return found


def test_the_notebooks_are_numbered_and_each_has_its_exercises():
    assert list(BY_NOTEBOOK) == NAMES
    assert [name[:2] for name in NAMES] == [f"{n:02d}" for n in range(len(NAMES))]
    names = [found.name for group in BY_NOTEBOOK.values() for found in group]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", NAMES)
def test_cells_are_clean(name):
    assert faults_of(code_of(name)) == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("class Router:\n    pass", "defines a class"),
        ("import requests", "imports requests"),
        ("from matplotlib import pyplot", "imports matplotlib"),
        ("a = 1  # " + "x" * 90, "longer than 96"),
    ],
)
def test_an_unclean_cell_is_caught(source, fault):
    cell = read(NAMES[0]).cells[1]
    cell.source = source
    (found,) = faults_of([cell])
    assert fault in found


def test_a_cell_that_has_been_run_is_caught():
    cell = read(NAMES[0]).cells[1]
    cell.execution_count = 3
    (found,) = faults_of([cell])
    assert "has been run" in found


@pytest.mark.parametrize("name", NAMES)
def test_the_head_says_what_how_long_and_when(name):
    first = read(name).cells[0]
    assert first.cell_type == "markdown" and first.source.startswith("# ")
    assert "**You will learn**" in first.source
    for line in ("Prerequisites", "Time", "Last verified"):
        assert f"| {line} | " in first.source
    assert re.search(r"\| Time \| \d+ minutes", first.source)
    assert re.search(r"\| Last verified \| 20\d\d-\d\d-\d\d \|", first.source)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_code_checks_the_environment_and_one_cell_holds_the_parameters(name):
    cells = code_of(name)
    assert cells[0].source == "from workbench import lessons\n\nlessons.check_environment()"
    tagged = [cell for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    assert tagged == [cells[1]]
    assert all(isinstance(node, ast.Assign) for node in ast.parse(tagged[0].source).body), (
        "parameters are values"
    )


@pytest.mark.parametrize("name", NAMES)
def test_each_exercise_is_text_blank_and_check(name):
    cells = read(name).cells
    places = {cell.id: place for place, cell in enumerate(cells)}
    assert len(BY_NOTEBOOK[name]) == 3
    for number, found in enumerate(BY_NOTEBOOK[name], start=1):
        place = places[blank_id(found.name)]
        assert cells[place].source == found.blank.strip()
        assert cells[place].metadata["tags"] == ["exercise"]
        assert cells[place + 1].source.startswith(f'lessons.check("{found.name}", answer, ')
        heading = f"### Exercise {number}: {found.name}"
        told = [cell.source for cell in cells[place - 2 : place]]
        assert any(heading in text for text in told), f"{heading} is missing before its blank"


@pytest.mark.parametrize("name", NAMES)
def test_the_file_is_in_canonical_form(name):
    raw = path_of(name).read_text(encoding="utf-8")
    tree = json.loads(raw)
    assert raw == json.dumps(tree, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    assert tree["metadata"] == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    ids = [cell["id"] for cell in tree["cells"]]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[a-z0-9-]+", each) for each in ids)


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_to_files_and_commands_exist(name):
    text = text_of(name)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert (path_of(name).parent / target).exists(), target
    for file in re.findall(r"`((?:engine|workbench)/[\w/]+\.py)`", text):
        assert (path_of(name).parents[1] / file).is_file(), file
    command = typer.main.get_command(app)
    shown = re.findall(r"`workbench ([^`]+)`", text)
    assert shown
    for line in shown:
        words = shlex.split(line)
        found = command.commands[words[0]]
        if hasattr(found, "commands"):
            found = found.commands[words[1]]
        options = {option for param in found.params for option in param.opts}
        assert {word for word in words if word.startswith("--")} <= options, line
