"""Read and write `.moetrace` files.

    manifest.json             {"format": "moetrace", "version": 5, "created_by", "start", "counts",
                               "dropped", "stages", "causes", "exchanges",
                               "arrays": {name: {dtype, shape}}}
    events.json               {"notes": [[order, kind, {fields}]], "decisions": [{texts}]}
    steps/….npy rows/….npy decisions/….npy ranks/….npy spans/….npy flights/….npy units/….npy
                              one array each; `numpy.load` reads the file too

Version 1 has no `ranks`, no "exchanges" and fewer stages; it is read as a run in one process.
Versions 1 and 2 have no `spans` and no `flights`.

Nothing is pickled. A file is written beside its target and renamed, so a reader sees the old one or
the whole new one. A file is not believed: sizes are checked against the manifest before memory is
taken, and whatever is cut, changed, foreign or newer is a `TraceError` of one sentence.
"""

from __future__ import annotations

import io
import json
import os
import struct
import tokenize
import zipfile
import zlib
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from engine import __version__
from engine.config import EXCHANGES
from engine.errors import TraceError
from engine.events import CAUSES, STAGES
from workbench.trace import records
from workbench.trace.schema import (
    COLUMNS,
    COLUMNS_SINCE,
    FORMAT,
    STAGES_OF,
    TABLES_SINCE,
    VERSION,
    Array,
    sizes,
)
from workbench.trace.trace import Dropped, Trace

MAX_BYTES = 2 << 30
"""Most bytes a file may unpack to, unless the caller allows more."""
_MAX_JSON_BYTES = 256 << 20
_BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    KeyError,
    TypeError,
    ValueError,
    OverflowError,
    NotImplementedError,
    RuntimeError,
    RecursionError,
    MemoryError,
    SyntaxError,
    tokenize.TokenError,
    OSError,
)
"""What the zip, json and npy readers raise for a file that is not what it says."""


def save(trace: Trace, path: str | Path) -> Path:
    """Write a trace; the same trace gives the same bytes.

    Raises:
        TraceError: the file cannot be written there, or an event holds what JSON cannot.
    """
    path = Path(path)
    _refuse_special(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as file:
            _write(trace, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as wrong:
        raise TraceError(f"cannot write trace {path}: {wrong.strerror or wrong}.") from None
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    return path


def check_place(path: str | Path, what: str = "trace") -> None:
    """Refuse at once a place to which `save`, or who writes `what`, cannot write later.

    Raises:
        TraceError: `path` is a folder or a device, or its folder is missing or read-only.
    """
    path = Path(path)
    if path.is_dir():
        raise TraceError(f"cannot write {what} {path}: it is a folder; name a file.")
    if not path.parent.is_dir():
        raise TraceError(f"cannot write {what} {path}: its folder does not exist; make it first.")
    if not os.access(path.parent, os.W_OK):
        raise TraceError(f"cannot write {what} {path}: its folder is read-only.")
    _refuse_special(path, what)


def load(path: str | Path, *, max_bytes: int = MAX_BYTES) -> Trace:
    """Read a trace.

    Args:
        path: the file.
        max_bytes: refuse a file that unpacks to more.

    Raises:
        TraceError: the file is missing, foreign, truncated, damaged, too large, or newer than this
            version can read.
    """
    path = Path(path)
    try:
        file = path.open("rb")
    except OSError as wrong:
        raise TraceError(f"cannot read trace {path}: {wrong.strerror or wrong}.") from None
    with file:
        magic = file.read(4)
        if magic != b"PK\x03\x04":
            what = "is empty" if not magic else "is not a .moetrace file"
            raise TraceError(f"{path} {what}; record one with 'workbench trace record'.")
        try:
            return _read(path, file, max_bytes)
        except _BROKEN as wrong:
            raise TraceError(
                f"{path} is truncated or damaged ({_reason(wrong)}); record or copy it again."
            ) from None
        except TraceError as wrong:
            raise TraceError(f"{path} cannot be used: {wrong}") from None


def _refuse_special(path: Path, what: str = "trace") -> None:
    """Refuse to put a file in the place of a device, a pipe or a socket."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise TraceError(f"cannot write {what} {path}: it is not a regular file; name another.")


def _write(trace: Trace, file: BinaryIO) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        _add(archive, "manifest.json", records.to_json(_manifest(trace)))
        _add(archive, "events.json", records.to_json(records.pack_events(trace)))
        for name in COLUMNS:
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, trace.columns[name], allow_pickle=False)
            _add(archive, f"{name}.npy", buffer.getvalue())


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    """Write one member with a fixed date, so that equal traces are equal files."""
    info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
    info.compress_type = zipfile.ZIP_DEFLATED
    info.external_attr = 0o644 << 16
    archive.writestr(info, data, compresslevel=1)


def _manifest(trace: Trace) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "created_by": f"tokenrouter-workbench {__version__}",
        "start": records.pack(trace.start),
        "counts": {
            "steps": trace.num_steps,
            "rows": trace.num_rows,
            "decisions": len(trace.decisions),
            "ranks": trace.num_rank_lines,
            "spans": len(trace.columns["spans/rank"]),
            "flights": len(trace.columns["flights/rank"]),
            "units": len(trace.columns["units/layer"]),
            "notes": len(trace.notes),
        },
        "dropped": records.pack(trace.dropped),
        "stages": list(STAGES),
        "causes": list(CAUSES),
        "exchanges": list(EXCHANGES),
        "arrays": {
            name: {"dtype": column.dtype.str, "shape": list(column.shape)}
            for name, column in trace.columns.items()
        },
    }


def _read(path: Path, file: BinaryIO, max_bytes: int) -> Trace:
    with zipfile.ZipFile(file) as archive:
        members = _members(archive, path.stat().st_size, max_bytes)
        manifest = _read_manifest(archive, members)
        start = records.unpack_start(manifest["start"])
        version = manifest["version"]
        later = [table for table, since in TABLES_SINCE.items() if version >= since]
        keys = ("steps", "rows", "decisions", *later)
        counts = {key: int(manifest["counts"][key]) for key in keys}
        lengths = sizes(start, **counts, version=version)
        columns = {
            name: _read_array(
                archive, members[f"{name}.npy"], dtype, tuple(lengths[x] for x in letters)
            )
            for name, (dtype, letters) in _columns_of(version).items()
        }
        if version < VERSION:
            columns = _from_older(columns, sizes(start, **counts), version)
        events = _read_json(archive, members["events.json"])
    notes = records.unpack_notes(events["notes"])
    decisions = records.unpack_decisions(events["decisions"], columns, version)
    dropped = records.unpack(Dropped, manifest["dropped"])
    return Trace(start, columns, decisions, notes, dropped)


def _members(
    archive: zipfile.ZipFile, file_bytes: int, max_bytes: int
) -> dict[str, zipfile.ZipInfo]:
    """Return the members by name, refusing sizes that cannot be true or are not wanted."""
    infos = archive.infolist()
    members = {info.filename: info for info in infos}
    if len(members) != len(infos):
        raise TraceError("it holds a member twice.")
    if "manifest.json" not in members:
        raise TraceError("it is a zip file without manifest.json, not a .moetrace file.")
    unpacked = sum(info.file_size for info in infos)
    if unpacked > max_bytes:
        raise TraceError(f"it says it unpacks to {unpacked} bytes; allowed are {max_bytes}.")
    if sum(info.compress_size for info in infos) > file_bytes:
        raise TraceError("its members overlap.")
    if any(info.file_size > 1100 * info.compress_size + 64 for info in infos):
        raise TraceError("a member says it unpacks to more than deflate can hold.")
    return members


def _read_manifest(archive: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo]) -> dict[str, Any]:
    manifest = _read_json(archive, members["manifest.json"])
    if manifest.get("format") != FORMAT:
        raise TraceError(f"its manifest says format {manifest.get('format')!r}, not {FORMAT!r}.")
    version = manifest.get("version")
    if type(version) is not int or version < 1:
        raise TraceError(f"its manifest says version {version!r}, which is no format version.")
    if version > VERSION:
        raise TraceError(
            f"it was written in trace format {version}, this workbench reads up to {VERSION}; "
            "update the workbench."
        )
    names = {"stages": STAGES_OF[version], "causes": CAUSES}
    for key, ours in (names if version == 1 else names | {"exchanges": EXCHANGES}).items():
        if manifest.get(key) != list(ours):
            raise TraceError(f"its manifest names other {key} than version {version} has.")
    arrays = (f"{name}.npy" for name in _columns_of(version))
    expected = {"manifest.json", "events.json", *arrays}
    if lacking := sorted(expected - members.keys()):
        raise TraceError(f"it lacks the member {lacking[0]!r}.")
    if surplus := sorted(members.keys() - expected):
        raise TraceError(f"it holds the unknown member {surplus[0]!r}.")
    return manifest


def _columns_of(version: int) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return the columns that a file of `version` has."""
    return {
        name: column
        for name, column in COLUMNS.items()
        if version >= max(TABLES_SINCE.get(name.split("/")[0], 1), COLUMNS_SINCE.get(name, 1))
    }


def _from_older(
    columns: dict[str, Array], lengths: dict[str, int], version: int
) -> dict[str, Array]:
    """Add what an older version did not have: empty tables and columns, stages as unreported."""
    now_of_old = np.array([STAGES.index(stage) for stage in STAGES_OF[version]], np.uint8)
    changed: dict[str, Array] = {}
    for name in ("steps/stage_ms", "ranks/stage_ms"):
        if name in columns:
            old_XG = columns[name]
            changed[name] = np.full((len(old_XG), len(STAGES)), np.nan)
            changed[name][:, now_of_old] = old_XG
    if "spans/stages" in columns:
        stages = columns["spans/stages"]
        if stages.size and stages.max() >= len(now_of_old):
            raise TraceError(f"column 'spans/stages' holds {stages.max()}, which is no stage.")
        changed["spans/stages"] = now_of_old[stages]
    added = {
        name: np.zeros(tuple(lengths[x] for x in letters), dtype)
        for name, (dtype, letters) in COLUMNS.items()
        if name not in columns
    }
    for name in ("decisions/capacity", "decisions/unit"):
        if name in added:
            added[name] -= 1
    return {**columns, **added, **changed}


def _read_json(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> dict[str, Any]:
    if info.file_size > _MAX_JSON_BYTES:
        raise TraceError(f"{info.filename} is larger than {_MAX_JSON_BYTES} bytes.")
    value = json.loads(archive.read(info))
    if not isinstance(value, dict):
        raise TraceError(f"{info.filename} is not a JSON object.")
    return value


def _read_array(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, dtype: str, shape: tuple[int, ...]
) -> Array:
    """Return one array, believing neither its header nor its length."""
    name, wanted = info.filename, np.dtype(dtype)
    data = archive.read(info)
    stream = io.BytesIO(data)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise TraceError(f"{name} is not a version 1.0 npy array.")
    header = np.lib.format.read_array_header_1_0(stream)
    if header != (shape, False, wanted):
        raise TraceError(
            f"{name} says shape {header[0]} and dtype {header[2]}; "
            f"its manifest asks for {shape} and {wanted}."
        )
    if len(data) - stream.tell() != prod(shape) * wanted.itemsize:
        raise TraceError(f"{name} holds {len(data) - stream.tell()} bytes of numbers, not as said.")
    return np.frombuffer(data, wanted, offset=stream.tell()).reshape(shape)


def _reason(wrong: BaseException) -> str:
    text = str(wrong).strip().rstrip(".").splitlines()
    return text[0] if text and text[0] else type(wrong).__name__
