"""Options in groups are the fields of dataclasses, on the command line and in the call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from workbench.grouped import grouped

CALLS: list[tuple] = []


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How large."""

    width: Annotated[int, typer.Option(help="Of a box.")] = 2
    names: Annotated[list[str] | None, typer.Option("--name", metavar="N")] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where."""

    text: Annotated[str | None, typer.Argument()] = None


@grouped
def build(
    *,
    place: Place,
    depth: Annotated[int, typer.Option()] = 1,
    size: Size,
    level: Annotated[int, typer.Option()],
) -> None:
    """Build a box."""
    CALLS.append((place, depth, size, level))


@pytest.fixture
def run():
    app = typer.Typer()
    app.command()(build)
    CALLS.clear()
    return lambda *words: CliRunner().invoke(app, list(words))


def test_each_group_is_made_of_its_own_options(run):
    assert run("here", "--width", "5", "--name", "a", "--name", "b", "--level", "3").exit_code == 0
    assert CALLS == [(Place(text="here"), 1, Size(width=5, names=["a", "b"]), 3)]


def test_defaults_are_those_of_the_fields(run):
    assert run("--level", "0").exit_code == 0
    assert CALLS == [(Place(), 1, Size(), 0)]


def test_types_are_checked_and_what_has_no_default_is_asked_for(run):
    assert run("--width", "wide", "--level", "1").exit_code == 2
    missing = run("--width", "1")
    assert missing.exit_code == 2 and "--level" in missing.output
    assert not CALLS


def test_the_help_has_the_groups_options_in_their_places(run):
    text = run("--help").output
    order = [text.index(word) for word in ("Build a box", "--depth", "--width", "--name")]
    assert order == sorted(order) and "Of a box." in text
