"""The learner's own copies: made once, never written over once they are changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import ConfigError, MachineError
from workbench import lesson_copies, paths
from workbench.lesson_copies import own_copies

NAME = "00_start_here"


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    """Stand for a checkout with two lessons."""
    folder = tmp_path / "checkout" / "notebooks"
    folder.mkdir(parents=True)
    for name in (NAME, "01_more"):
        (folder / f"{name}.ipynb").write_text(f"{name}, first edition")
    monkeypatch.setattr(paths, "root", lambda: folder.parent)
    return folder


@pytest.fixture
def place(tmp_path) -> Path:
    return tmp_path / "home" / "lessons"


def shown(place: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in place.glob("*.ipynb")}


def test_the_first_time_every_lesson_is_copied_and_the_place_is_named(checkout, place):
    copies = own_copies(place)
    assert copies.folder == place and copies.said == () and copies.place == str(place)
    assert shown(place) == shown(checkout) and len(shown(place)) == 2
    assert own_copies(place) == copies


def test_what_a_learner_wrote_stays_and_a_newer_original_is_told_with_the_way_to_it(
    checkout, place
):
    own_copies(place)
    (place / f"{NAME}.ipynb").write_text("my answers")
    assert own_copies(place).said == (), "their own change is nothing to speak of"
    for name in (NAME, "01_more"):
        (checkout / f"{name}.ipynb").write_text("second edition")
    for _ in range(2):
        told = own_copies(place).said
        (newer,) = [said for said in told if said.startswith(NAME)]
        assert "newer original" in newer and "workbench lab --fresh" in newer
        assert shown(place) == {f"{NAME}.ipynb": "my answers", "01_more.ipynb": "second edition"}
    assert not any(said.startswith("01_more") for said in told), "renewed and said once"


def test_fresh_sets_aside_what_was_changed_and_loses_nothing(checkout, place):
    own_copies(place)
    (place / f"{NAME}.ipynb").write_text("my answers")
    said = own_copies(place, fresh=True).said
    mine = next(place.glob(f"{NAME}.mine-*.ipynb"))
    assert mine.read_text() == "my answers" and mine.name in said[0] and len(said) == 1
    assert (place / f"{NAME}.ipynb").read_text() == f"{NAME}, first edition"
    assert own_copies(place, fresh=True).said == (), "again there is nothing to set aside"


def test_copies_of_an_unknown_origin_are_kept(checkout, place):
    place.mkdir(parents=True)
    (place / f"{NAME}.ipynb").write_text("from elsewhere")
    (place / ".originals.json").write_text("{damaged")
    assert "yours is kept" in own_copies(place).said[0]
    assert (place / f"{NAME}.ipynb").read_text() == "from elsewhere"


def test_the_originals_a_file_and_an_unwritable_place_are_refused(checkout, tmp_path):
    with pytest.raises(ConfigError, match="holds the originals"):
        own_copies(checkout)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="is a file"):
        own_copies(file)
    with pytest.raises(MachineError, match="cannot be written.*--lessons DIR"):
        own_copies(file / "below")
    for lesson in checkout.iterdir():
        lesson.unlink()
    with pytest.raises(MachineError, match="holds no lessons"):
        own_copies(tmp_path / "other")


def test_without_a_folder_they_are_in_a_place_of_the_users_own(checkout, tmp_path, monkeypatch):
    monkeypatch.setattr(lesson_copies, "_default_folder", lambda: tmp_path / "data" / "lessons")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert own_copies().folder == tmp_path / "data" / "lessons"
    assert own_copies().place == "~/data/lessons"
    monkeypatch.undo()
    assert lesson_copies._default_folder().parts[-2:] == ("tokenrouter-workbench", "lessons")
