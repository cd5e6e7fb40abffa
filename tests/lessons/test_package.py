"""The lessons' public names, and the environment check that must work when things are missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys

import pytest

from workbench import lessons
from workbench.lessons import environment


def test_every_public_name_is_there_and_stays_what_it_is():
    first = {name: getattr(lessons, name) for name in lessons.__all__}
    assert all(callable(value) for value in first.values())
    # A module of the same name as a function would take its place once imported.
    assert {name: getattr(lessons, name) for name in lessons.__all__} == first
    with pytest.raises(AttributeError, match="no attribute 'lesson'"):
        _ = lessons.lesson


def test_the_check_itself_needs_neither_torch_nor_the_extras():
    source = (
        "import sys; from workbench import lessons; lessons.check_environment\n"
        "print(sorted({'torch', 'pandas', 'plotly', 'anywidget'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_complete_environment_is_called_complete():
    assert repr(lessons.check_environment()).startswith("**✓** Everything is here: Python 3.")
    assert list(environment.problems()) == []


def test_a_missing_package_is_named_with_what_to_do(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("plotly",) else real(name)
    )
    (sentence,) = environment.problems()
    assert sentence == f"plotly cannot be imported; {environment.MEND}."


@pytest.mark.parametrize(
    ("version", "fits"), [("7.1.0", False), ("7.2.0", True), ("7.3.0", True), ("7.4.0", False)]
)
def test_a_kernel_that_loses_widget_messages_is_named(monkeypatch, version, fits):
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata,
        "version",
        lambda name: version if name == "ipykernel" else real(name),
    )
    found = list(environment.problems())
    assert found == [] if fits else f"ipykernel is {version}" in found[0]


def test_an_old_python_and_a_missing_model_are_two_sentences(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    found = list(environment.problems("no-such-model"))
    assert found[0].startswith("This is Python 3.10, the lessons need 3.11 or later;")
    assert found[1].startswith("Model folder no-such-model does not exist;")
    shown = repr(environment.check_environment("no-such-model"))
    assert shown.count("- **✗** ") == 2 and shown.count("\n") == 1
