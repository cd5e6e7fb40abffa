"""The hashes of a model folder: write them once, verify them before every load.

`manifest.json` lists every file of the folder with its size and SHA-256, except what no loader
reads: documentation (`*.md`, `LICENSE*`, `NOTICE*`), hidden files, and folders; and except
`precision.json`, which is measured on the weights and says itself on which. A file that it does
not list is as wrong as one that it lists and that is gone.

`python -m engine.checkpoint.manifest FOLDER` writes it, `… --check FOLDER` verifies it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from engine.checkpoint.files import member, model_folder, plain_name, read_json
from engine.errors import CheckpointError, WorkbenchError

NAME = "manifest.json"
FORMAT = 1
UNLISTED = (NAME, "precision.json", ".*", "*.md", "LICENSE*", "NOTICE*")
HASH_THREADS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """What one file must be."""

    bytes: int
    sha256: str
    """64 lower-case hexadecimal digits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Every file of a model folder that a loader may read, by name."""

    files: Mapping[str, FileEntry]

    @property
    def total_bytes(self) -> int:
        """Return the size of all listed files together."""
        return sum(entry.bytes for entry in self.files.values())


def write_manifest(folder: str | Path) -> Manifest:
    """Hash the files of `folder`, write its `manifest.json`, and return it.

    Raises:
        CheckpointError: the folder is missing, empty, or has a file that `files.member` refuses.
    """
    folder = model_folder(folder)
    paths = {name: member(folder, name) for name in _listable(folder)}
    if not paths:
        raise CheckpointError(f"{folder}: there is no file to list; save a model there first.")
    digests = _digests(paths)
    manifest = Manifest(
        files={
            name: FileEntry(bytes=path.stat().st_size, sha256=digests[name])
            for name, path in paths.items()
        }
    )
    # Written aside and moved, so that an interrupted run leaves the old manifest or the new one.
    aside = folder / f".{NAME}.partial"
    aside.write_text(_to_json(manifest), encoding="utf-8")
    os.replace(aside, folder / NAME)
    return manifest


def read_manifest(folder: str | Path) -> Manifest:
    """Return the manifest of `folder` without looking at the files it lists.

    Raises:
        CheckpointError: it is missing, not valid, or of a newer format.
    """
    folder = model_folder(folder)
    path = member(folder, NAME)
    content = read_json(path)
    if content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: format {content.get('format')!r} is not known, only {FORMAT}; "
            "update the program or write the manifest again."
        )
    files = content.get("files")
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{path}: 'files' must be an object that lists the files.")
    return Manifest(
        files={plain_name(folder, name): _entry(path, name, raw) for name, raw in files.items()}
    )


def verify(folder: str | Path, *, hashes: bool = True) -> Manifest:
    """Hold every file of `folder` against its manifest and return the manifest.

    Sizes come first and cost nothing; `hashes=False` stops there. Hashing reads every byte once, in
    chunks, some files at a time.

    Raises:
        CheckpointError: the manifest is missing or not valid, or a file is missing, left over,
            a Git LFS pointer, of another size, or of another content.
    """
    folder = model_folder(folder)
    manifest = read_manifest(folder)
    paths = {name: member(folder, name) for name in manifest.files}
    for name, path in paths.items():
        size, wanted = path.stat().st_size, manifest.files[name].bytes
        if size != wanted:
            raise CheckpointError(
                f"{path}: has {size} bytes, its manifest says {wanted}; copy the file again."
            )
    for name in _listable(folder):
        if name not in manifest.files:
            raise CheckpointError(
                f"{folder / name}: this file is not in the manifest; remove it, or write the "
                "manifest again if it belongs there."
            )
    for name, digest in _digests(paths).items() if hashes else ():
        if digest != manifest.files[name].sha256:
            raise CheckpointError(
                f"{paths[name]}: its SHA-256 is not the manifest's, the content was changed or "
                "damaged; copy the file again."
            )
    return manifest


def fingerprint(folder: str | Path) -> str:
    """Return one SHA-256 for all weights of a folder, from the hashes in its manifest.

    Raises:
        CheckpointError: the manifest is missing or not valid.
    """
    files = read_manifest(folder).files
    weights = sorted(f"{name} {e.sha256}" for name, e in files.items() if "safetensors" in name)
    return hashlib.sha256("\n".join(weights).encode()).hexdigest()


def main(arguments: list[str] | None = None) -> int:
    """Write or check the manifest of one folder; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.checkpoint.manifest", description="Hash a model folder."
    )
    parser.add_argument("folder", type=Path, help="model folder")
    parser.add_argument("--check", action="store_true", help="verify instead of writing")
    options = parser.parse_args(arguments)
    try:
        manifest = (verify if options.check else write_manifest)(options.folder)
    except WorkbenchError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    done = "verified" if options.check else "listed"
    print(f"{done} {len(manifest.files)} files, {manifest.total_bytes:,} bytes")
    return 0


def _listable(folder: Path) -> list[str]:
    """Return the names a manifest of `folder` lists, in order."""
    return sorted(
        path.name
        for path in folder.iterdir()
        if not path.is_dir() and not any(fnmatchcase(path.name, p) for p in UNLISTED)
    )


def _digests(paths: Mapping[str, Path]) -> dict[str, str]:
    """Return name -> SHA-256; hashing releases the interpreter lock, so threads do help."""
    with ThreadPoolExecutor(HASH_THREADS) as pool:
        return dict(zip(paths, pool.map(_sha256, paths.values()), strict=True))


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as failed:
        raise CheckpointError(f"{path}: cannot be read ({failed.strerror}).") from None


def _entry(path: Path, name: str, raw: Any) -> FileEntry:
    size = raw.get("bytes") if isinstance(raw, dict) else None
    digest = raw.get("sha256") if isinstance(raw, dict) else None
    if type(size) is not int or size < 0 or not re.fullmatch("[0-9a-f]{64}", str(digest)):
        raise CheckpointError(
            f"{path}: the entry of {name!r} must have 'bytes' (a whole number) and 'sha256' "
            f"(64 hexadecimal digits), not {raw!r:.80}."
        )
    return FileEntry(bytes=size, sha256=str(digest))


def _to_json(manifest: Manifest) -> str:
    files = {
        name: {"bytes": entry.bytes, "sha256": entry.sha256}
        for name, entry in manifest.files.items()
    }
    return json.dumps({"format": FORMAT, "files": files}, indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    sys.exit(main())
