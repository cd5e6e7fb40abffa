"""A learner's own copies of the lessons: they may be written in, the originals stay as they are.

    NAME.ipynb              a copy
    NAME.mine-STAMP.ipynb   a changed copy that was set aside for a fresh one
    .originals.json         name -> hash of the original that the copy was made from

A copy that somebody has changed is never written over.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigError, MachineError
from workbench import paths

_ORIGINALS = ".originals.json"


@dataclass(frozen=True, slots=True)
class Copies:
    """Where a person's own copies are, and what is to be said of them."""

    folder: Path
    said: tuple[str, ...]
    """What was renewed, set aside, or has a newer original, one sentence each."""

    @property
    def place(self) -> str:
        """The folder as a person writes it, with ~ for their home."""
        home = Path.home()
        near = self.folder.is_relative_to(home)
        return f"~/{self.folder.relative_to(home)}" if near else str(self.folder)


def originals() -> list[Path]:
    """Return the notebooks of the checkout, in their order.

    Raises:
        MachineError: there are none.
    """
    folder = paths.root() / "notebooks"
    found = sorted(folder.glob("[0-9]*.ipynb"))
    if not found:
        raise MachineError(f"{folder} holds no lessons; run from a complete checkout.")
    return found


def own_copies(folder: Path | None = None, *, fresh: bool = False) -> Copies:
    """Copy what is missing, renew what nobody has changed, say what has a newer original.

    Args:
        folder: where the copies are; None takes a place of the user's own.
        fresh: also renew what was changed; the changed copies are set aside.

    Raises:
        ConfigError: `folder` is none, or holds the originals.
        MachineError: it cannot be written, or the checkout holds no lessons.
    """
    found = originals()
    place = _default_folder() if folder is None else folder.expanduser().absolute()
    if place.is_file():
        raise ConfigError(f"lessons ({place}) is a file; name a folder for your copies.")
    if place.resolve() == found[0].parent.resolve():
        raise ConfigError(
            f"lessons ({place}) holds the originals; name another folder for your copies."
        )
    try:
        place.mkdir(parents=True, exist_ok=True)
        made_from = _read(place)
        said = [_renew(original, place, made_from, fresh) for original in found]
        _write(place / _ORIGINALS, json.dumps(made_from, indent=1).encode())
    except OSError as wrong:
        raise MachineError(
            f"{wrong.filename or place} cannot be written: {wrong.strerror or wrong}; "
            "name another folder for your copies of the lessons with --lessons DIR."
        ) from None
    return Copies(place, tuple(filter(None, said)))


def _renew(original: Path, place: Path, made_from: dict[str, str], fresh: bool) -> str:
    """Bring one copy up to date; return what is to be said of it, or nothing."""
    name, copy = original.stem, place / original.name
    content = original.read_bytes()
    new, old = _sha256(content), made_from.get(name)
    if not copy.exists():
        _write(copy, content)
        made_from[name] = new
        return ""
    present = _sha256(copy.read_bytes())
    if present == new:
        made_from[name] = new
        return ""
    if present == old:
        _write(copy, content)
        made_from[name] = new
        return f"{name} was renewed; you had not changed it"
    if fresh:
        aside = copy.with_name(f"{name}.mine-{time.strftime('%Y%m%d-%H%M%S')}.ipynb")
        copy.rename(aside)
        _write(copy, content)
        made_from[name] = new
        return f"{name} is fresh; yours is now {aside.name}"
    if new != old:
        return (
            f"{name} has a newer original; yours is kept. To set it aside and begin anew: "
            "workbench lab --fresh"
        )
    return ""


def _default_folder() -> Path:
    from platformdirs import user_data_path

    return user_data_path("tokenrouter-workbench", appauthor=False) / "lessons"


def _read(place: Path) -> dict[str, str]:
    """Return what the copies were made from; nothing where that is not known."""
    try:
        found = json.loads((place / _ORIGINALS).read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return {str(name): str(sha) for name, sha in found.items()} if isinstance(found, dict) else {}


def _write(file: Path, content: bytes) -> None:
    """Write beside the place and move into it, so that no reader meets half a file."""
    part = file.with_name(f".{file.name}.part-{os.getpid()}")
    part.write_bytes(content)
    part.replace(file)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
