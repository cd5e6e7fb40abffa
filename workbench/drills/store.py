"""What a drill keeps on disk: who runs one now, and the journals of those that ended.

    current.json         the drill under way: where it listens, its key, whose processes run it
    lock                 held by the drill's process for as long as it lives
    journals/NAME.json   what happened in each drill
    NAME.damaged-STAMP   a file that could not be read, set aside

Files are written beside their place and moved into it, so that a reader never meets half of one.
The lock goes with its process, however that ends, so what a killed drill left is known as stale.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from engine.errors import ConfigError, MachineError
from workbench.drills import files

CURRENT, LOCK, JOURNALS = "current.json", "lock", "journals"
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}")
"""What may become the name of a file."""


def default_folder() -> Path:
    """Return the folder under the user's state directory."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "tokenrouter-workbench" / "drills"


@dataclass(frozen=True, slots=True)
class Store:
    """One state folder; one drill at a time runs in it."""

    folder: Path

    @classmethod
    def at(cls, folder: str | Path | None = None) -> Store:
        """Return the store in `folder`, or in the user's state directory.

        Raises:
            ConfigError: `folder` is something else.
        """
        chosen = Path(folder) if folder is not None else default_folder()
        if chosen.exists() and not chosen.is_dir():
            raise ConfigError(f"state ({chosen}) is not a folder; name one with --state DIR.")
        return cls(chosen)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for one drill; what it announces stays until `forget`.

        Raises:
            MachineError: another drill runs in it.
        """
        handle = self._try_lock()
        if handle is None:
            raise self._taken()
        with handle:
            yield

    def require_free(self) -> None:
        """Refuse at once what would have to wait for another drill.

        Raises:
            MachineError: another drill runs here.
        """
        if self.busy:
            raise self._taken()

    @property
    def busy(self) -> bool:
        """Whether a living process holds the folder."""
        handle = self._try_lock()
        if handle is None:
            return True
        handle.close()
        return False

    def announce(self, facts: Mapping[str, Any]) -> None:
        """Say which drill runs and how to reach it; for this user's eyes only."""
        _write(self.folder / CURRENT, facts)

    def current(self) -> dict[str, Any] | None:
        """Return what was announced, also by a process that is gone; None without any, or damaged.

        What is returned names a drill that exists and a journal that is a plain file name.
        """
        try:
            facts = json.loads((self.folder / CURRENT).read_text("utf-8"))
            drill, journal = facts["drill"], facts["journal"]
        except (OSError, ValueError, LookupError, TypeError):
            return None
        known = _plain(drill) and (files.folder() / f"{drill}.yaml").is_file()
        return facts if known and _plain(journal) else None

    @property
    def damaged(self) -> bool:
        """Whether something was announced that cannot be understood."""
        return (self.folder / CURRENT).exists() and self.current() is None

    def set_aside(self) -> Path | None:
        """Rename a damaged announcement and return its new path; None if there is none."""
        return _aside(self.folder / CURRENT) if self.damaged else None

    def forget(self) -> None:
        """Take back what was announced; twice is fine."""
        (self.folder / CURRENT).unlink(missing_ok=True)

    def new_name(self, drill: str) -> str:
        """Return a name for a journal that no other has."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        return f"{stamp}-{drill}-{os.getpid()}"

    def save(self, name: str, journal: Mapping[str, Any]) -> Path:
        """Write a journal and return its file; a damaged one in its place is set aside.

        Raises:
            ConfigError: the name is not a plain file name.
        """
        if not _plain(name):
            raise ConfigError(f"journal ({name!r}) must be a plain file name.")
        path = self.folder / JOURNALS / f"{name}.json"
        if path.exists() and _journal(path) is None:
            _aside(path)
        _write(path, journal)
        return path

    def journals(self) -> list[Path]:
        """Return the journals, oldest first."""
        return sorted((self.folder / JOURNALS).glob("*.json"))

    def read(self, name: str | None = None) -> tuple[Path, dict[str, Any]]:
        """Return a journal by a part of its name, or the newest.

        Raises:
            MachineError: there is none, or it cannot be read.
        """
        known = self.journals()
        found = [path for path in known if path.stem == name]
        found = found or [path for path in known if name is None or name in path.stem]
        if not found:
            which = f" named {name}" if name else ""
            raise MachineError(f"there is no journal{which} in {self.folder / JOURNALS}.")
        content = _journal(found[-1])
        if content is None:
            raise MachineError(f"{found[-1]} is damaged: it does not hold the journal of a drill.")
        return found[-1], content

    def _taken(self) -> MachineError:
        if (now := self.current()) is None:
            return self.between()
        called = "an incident" if now.get("surprise") else f"the drill {now['drill']}"
        return MachineError(
            f"{called} is running in {self.folder} already; finish it with `workbench drill "
            "finish` or end it with `workbench drill reset`."
        )

    def between(self) -> MachineError:
        """Return what is said while a drill runs no more, or not yet."""
        return MachineError(
            f"a drill is just starting or ending in {self.folder}; try again in a moment."
        )

    def ended(self, journal: str) -> bool:
        """Return whether the drill with this journal has ended with a result."""
        content = _journal(self.folder / JOURNALS / f"{journal}.json")
        return content is not None and bool(content.get("result"))

    def _try_lock(self) -> IO[str] | None:
        import fcntl

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = (self.folder / LOCK).open("a")
        except OSError as wrong:
            raise MachineError(
                f"state ({self.folder}) cannot be used: {wrong.strerror}; name another folder with "
                "--state DIR."
            ) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.close()
            return None
        return handle


def _plain(name: object) -> bool:
    return isinstance(name, str) and _PLAIN.fullmatch(name) is not None


def _journal(path: Path) -> dict[str, Any] | None:
    """Return what a journal holds; None where it is damaged."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    sound = isinstance(content, dict) and isinstance(content.get("briefing"), dict)
    return content if sound else None


def _aside(path: Path) -> Path:
    """Rename a damaged file out of the way."""
    return path.rename(path.with_name(f"{path.name}.damaged-{time.time_ns()}"))


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(content, file, ensure_ascii=False, indent=1)
        file.write("\n")
    beside.replace(path)
