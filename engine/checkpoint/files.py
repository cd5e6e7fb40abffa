"""The only ways into a model folder: a checked file name, and bounded JSON.

Refuses names and symbolic links that leave the folder, what is not a regular file, and Git LFS
pointers left by a clone without LFS. Used by `manifest`, `reader` and `load`.
"""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from engine.errors import CheckpointError

LFS_MAGIC = b"version https://git-lfs"
MAX_JSON_BYTES = 64 * 2**20
"""An index of 128 experts in 94 layers is about 5 MB; more than this is not an index."""


def model_folder(folder: str | Path) -> Path:
    """Return `folder` as a path.

    Raises:
        CheckpointError: it does not exist or is not a folder.
    """
    path = Path(folder)
    if not path.is_dir():
        reason = "is not a folder" if path.exists() else "does not exist"
        raise CheckpointError(f"{path}: the model folder {reason}; name one that has config.json.")
    return path


def member(folder: Path, name: str) -> Path:
    """Return the path of the regular file `name` directly inside `folder`.

    Raises:
        CheckpointError: the name leaves the folder, or the file is missing, is reached through a
            link that leaves the folder, is not a regular file, or is a Git LFS pointer.
    """
    path = folder / plain_name(folder, name)
    if not path.exists():
        raise CheckpointError(f"{path}: the file is missing; copy the whole model folder again.")
    if not path.is_file():
        raise CheckpointError(f"{path}: this is not a regular file; replace it by one.")
    if path.resolve().parent != folder.resolve():
        raise CheckpointError(
            f"{path}: this link leads out of the model folder; put the file itself there."
        )
    if _begins_with(path, LFS_MAGIC):
        raise CheckpointError(
            f"{path}: this is a Git LFS pointer, not the file itself; run `git lfs pull` there."
        )
    return path


def plain_name(folder: Path, name: object) -> str:
    """Return `name` if it names a file directly inside `folder`.

    Raises:
        CheckpointError: it is not text, is empty, or has a folder part (``../x``, ``/x``, ``a/b``).
    """
    plain = isinstance(name, str) and name == PurePosixPath(name).name == PureWindowsPath(name).name
    if not plain or name in ("", ".", "..") or "\0" in str(name):
        raise CheckpointError(
            f"{folder}: the file name {name!r} leads out of the model folder; "
            "only names of files directly inside it are allowed."
        )
    return str(name)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`.

    Raises:
        CheckpointError: it cannot be read, is larger than `MAX_JSON_BYTES`, or is not an object.
    """
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(
                f"{path}: {size} bytes are too many for this file (at most {MAX_JSON_BYTES})."
            )
        content = json.loads(path.read_bytes())
    except OSError as failed:
        raise CheckpointError(f"{path}: cannot be read ({failed.strerror}).") from None
    except (ValueError, RecursionError) as wrong:
        reason = str(wrong).splitlines()[0]
        raise CheckpointError(f"{path}: this is not valid JSON ({reason}); restore it.") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, not a JSON object.")
    return content


def _begins_with(path: Path, magic: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(magic)) == magic
    except OSError as failed:
        raise CheckpointError(f"{path}: cannot be read ({failed.strerror}).") from None
