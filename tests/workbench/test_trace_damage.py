"""Trace files that are damaged, foreign, newer, or lie are refused; writing harms nothing."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from engine.errors import TraceError
from engine.events import ControlEvent
from workbench.trace import Trace, load, replay, save
from workbench.trace.schema import COLUMNS, VERSION
from workbench.trace.store import check_place


def rewrite(file: Path, change) -> Path:
    """Write the file again with its members passed through `change(dict)`."""
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return file


def change_manifest(**values):
    def change(members):
        members["manifest.json"] = json.dumps(
            json.loads(members["manifest.json"]) | values
        ).encode()

    return change


def assert_refused(file: Path, *words: str) -> None:
    with pytest.raises(TraceError) as caught:
        load(file)
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith(".") and str(file) in sentence
    for word in words:
        assert word in sentence


def test_a_missing_file_a_folder_and_an_empty_file_are_refused(tmp_path):
    assert_refused(tmp_path / "none.moetrace", "No such file")
    assert_refused(tmp_path, "directory")
    (tmp_path / "empty").write_bytes(b"")
    assert_refused(tmp_path / "empty", "is empty")


@pytest.mark.parametrize("data", [b"hello", b"\x93NUMPY", b"{}", b"PK\x05\x06" + b"\0" * 18])
def test_a_file_that_is_no_zip_is_foreign(tmp_path, data):
    (tmp_path / "foreign").write_bytes(data)
    assert_refused(tmp_path / "foreign", "is not a .moetrace file")


def test_another_zip_is_foreign(tmp_path):
    with zipfile.ZipFile(tmp_path / "foreign", "w") as archive:
        archive.writestr("word/document.xml", "<xml/>")
    assert_refused(tmp_path / "foreign", "without manifest.json")


def test_a_trace_cut_anywhere_is_refused(file):
    whole = file.read_bytes()
    for length in [*range(4, len(whole), max(1, len(whole) // 60)), len(whole) - 1]:
        file.write_bytes(whole[:length])
        assert_refused(file, "truncated or damaged")


def test_a_flipped_byte_is_refused_or_harmless(file, trace, same):
    whole = file.read_bytes()
    harmless = 0
    places = np.random.default_rng(0).choice(len(whole), 400, replace=False)
    for place in [*places.tolist(), *range(60), *range(len(whole) - 60, len(whole))]:
        changed = bytearray(whole)
        changed[place] ^= 0x41
        file.write_bytes(changed)
        try:
            loaded = load(file)
        except TraceError as refused:
            assert "\n" not in str(refused)
        else:
            harmless += 1
            assert all(map(same, replay(loaded), replay(trace)))
    assert harmless < 150, "most flips hit numbers, which the file must notice"


def test_a_newer_version_is_named_as_such(file):
    rewrite(file, change_manifest(version=VERSION + 1))
    assert_refused(file, f"format {VERSION + 1}", "update the workbench")


@pytest.mark.parametrize("version", [0, -1, "1", 1.0, True, None])
def test_a_version_that_is_none_is_refused(file, version):
    rewrite(file, change_manifest(version=version))
    assert_refused(file, "no format version")


def test_another_format_is_refused(file):
    rewrite(file, change_manifest(format="triton-viz"))
    assert_refused(file, "'triton-viz'")


def test_a_missing_and_an_unknown_member_are_refused(file, trace, tmp_path):
    rewrite(file, lambda members: members.pop("rows/margins.npy"))
    assert_refused(file, "lacks the member 'rows/margins.npy'")
    save(trace, file)
    rewrite(file, lambda members: members.update({"evil.pkl": b"x"}))
    assert_refused(file, "unknown member 'evil.pkl'")


def test_a_pickled_array_is_refused(file):
    def change(members):
        buffer = io.BytesIO()
        np.lib.format.write_array(buffer, np.array([{}] * 18, object), allow_pickle=True)
        members["rows/token_ids.npy"] = buffer.getvalue()

    rewrite(file, change)
    assert_refused(file, "rows/token_ids.npy")


def test_a_header_that_lies_about_its_size_takes_no_memory(file):
    def change(members):
        head = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            head, {"shape": (1 << 50,), "fortran_order": False, "descr": "<i4"}
        )
        members["rows/token_ids.npy"] = head.getvalue() + b"\0" * 16

    rewrite(file, change)
    assert_refused(file, "rows/token_ids.npy says shape")


def test_counts_and_headers_that_lie_together_take_no_memory(file):
    def change(members):
        manifest = json.loads(members["manifest.json"])
        manifest["counts"]["rows"] = 1 << 50
        members["manifest.json"] = json.dumps(manifest).encode()
        for name, (dtype, letters) in COLUMNS.items():
            if name.startswith("rows/"):
                tail = [{"L": 4, "K": 2}[letter] for letter in letters[1:]]
                head = io.BytesIO()
                np.lib.format.write_array_header_1_0(
                    head,
                    {"shape": (1 << 50, *tail), "fortran_order": False, "descr": dtype},
                )
                members[f"{name}.npy"] = head.getvalue() + b"\0" * 16

    rewrite(file, change)
    assert_refused(file, "not as said")


def test_a_zip_bomb_is_refused_before_it_is_unpacked(file):
    rewrite(file, lambda members: members.update({"rows/homes.npy": b"\0" * (1 << 22)}))
    with pytest.raises(TraceError, match="allowed are 1048576"):
        load(file, max_bytes=1 << 20)


@pytest.mark.parametrize("name", ["steps/row_start", "decisions/step_index", "steps/order"])
def test_tables_that_do_not_fit_together_are_refused(file, trace, name):
    def change(members):
        buffer = io.BytesIO()
        np.lib.format.write_array(buffer, np.full_like(trace.columns[name], 99))
        members[f"{name}.npy"] = buffer.getvalue()

    rewrite(file, change)
    assert_refused(file, f"'{name}'")


@pytest.mark.parametrize(
    "lie",
    [
        {"num_experts": 10**9},
        {"num_experts": 2**63},
        {"top_k": 9},
        {"num_devices": 0},
        {"num_devices": 10**9},
        {"num_layers": 10**9},
        {"num_layers": 10**6, "moe_layers": list(range(10**6))},
        {"moe_layers": [-1, 0, 1, 2]},
        {"moe_layers": [0, 1, 2, 4]},
        {"rank_of_phy": [10**30]},
        {"time_s": float("nan")},
    ],
)
def test_a_start_record_that_lies_is_refused_before_anything_is_sized_by_it(file, lie):
    def change(members):
        manifest = json.loads(members["manifest.json"])
        manifest["start"] |= lie
        members["manifest.json"] = json.dumps(manifest).encode()

    rewrite(file, change)
    assert_refused(file, next(iter(lie)) if len(lie) == 1 else "num_layers")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps/time_s", np.nan),
        ("steps/time_s", -1.0),
        ("steps/duration_ms", np.nan),
        ("steps/duration_ms", np.inf),
        ("steps/duration_ms", 1e308),
        ("steps/stage_ms", np.inf),
        ("steps/stage_ms", -1.0),
    ],
)
def test_a_time_that_is_none_is_refused(file, trace, name, value):
    def change(members):
        column = trace.columns[name].copy()
        column.reshape(-1)[-1] = value
        buffer = io.BytesIO()
        np.lib.format.write_array(buffer, column)
        members[f"{name}.npy"] = buffer.getvalue()

    rewrite(file, change)
    assert_refused(file, f"'{name}'")


@pytest.mark.parametrize(
    "note",
    [
        [
            9999,
            "control",
            {"action": "x", "detail": {}, "table_version": 1, "time_s": float("nan")},
        ],
        [9999, "text", {"request_id": 1}],
        [9999, "gossip", {}],
        [-1, "text", {}],
        ["0", "text", {}],
        [9999],
        7,
        [9999, "control", {"action": 1, "detail": {}, "table_version": 1, "time_s": 0.0}],
    ],
)
def test_a_note_of_another_shape_is_refused(file, note):
    def change(members):
        events = json.loads(members["events.json"])
        events["notes"].append(note)
        members["events.json"] = json.dumps(events).encode()

    rewrite(file, change)
    assert_refused(file)


def test_a_failed_write_leaves_the_old_file_and_no_part(file, trace, tmp_path):
    before = file.read_bytes()
    bad = Trace(
        trace.start,
        trace.columns,
        trace.decisions,
        ((10_000, ControlEvent("publish", {"table": object()}, 1, 0.0)),),
    )
    with pytest.raises(TraceError, match="JSON"):
        save(bad, file)
    assert file.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [file.name]


def test_a_place_that_cannot_be_written_is_named(trace, tmp_path):
    with pytest.raises(TraceError, match="No such file or directory"):
        save(trace, tmp_path / "none" / "x.moetrace")
    with pytest.raises(TraceError, match="cannot write trace"):
        save(trace, tmp_path)


def test_a_trace_never_takes_the_place_of_a_device_or_a_pipe(trace, tmp_path):
    pipe = tmp_path / "pipe.moetrace"
    os.mkfifo(pipe)
    for write in (lambda: check_place(pipe), lambda: save(trace, pipe)):
        with pytest.raises(TraceError, match="not a regular file"):
            write()
    assert pipe.is_fifo()
