"""A `.moetrace` file gives back what was put in, and refuses everything else in one sentence."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import TraceError
from engine.events import ControlEvent, TextEvent
from workbench.trace import Recorder, Trace, load, replay, save
from workbench.trace import synthetic as made
from workbench.trace.schema import COLUMNS, VERSION
from workbench.trace.store import check_place


def record(events) -> Trace:
    recorder = Recorder()
    for event in events:
        recorder.emit(event)
    return recorder.trace()


@pytest.fixture
def trace() -> Trace:
    return record(made.run(made.start_event(), steps=6, rows=3))


@pytest.fixture
def file(trace, tmp_path) -> Path:
    return save(trace, tmp_path / "run.moetrace")


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


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    layers=st.integers(1, 5),
    experts=st.integers(1, 12),
    top_k=st.integers(1, 12),
    rows=st.lists(st.integers(0, 9), max_size=8),
    seed=st.integers(0, 999),
    text=st.text(max_size=20) | st.just("\ud800 \x00 ünï"),
)
def test_whatever_is_recorded_comes_back_bit_for_bit(
    same, tmp_path_factory, layers, experts, top_k, rows, seed, text
):
    start = made.start_event(layers=layers, experts=experts, top_k=min(top_k, experts))
    events = [start]
    for step, count in enumerate(rows):
        events.append(made.step_event(start, step, count, seed=seed, num_decisions=2))
        events.append(TextEvent(step, "en", text, 1, False, start.time_s))
        events.append(ControlEvent("ban_expert", {"layer": None, "expert": 1}, 1, start.time_s))
    path = tmp_path_factory.mktemp("traces") / "x.moetrace"
    save(record(events), path)
    got = list(replay(load(path)))
    assert len(got) == len(events)
    assert all(map(same, got, events))


def test_the_comparison_used_above_sees_one_changed_bit(same):
    start = made.start_event()
    one, other = (made.step_event(start, 0, 3) for _ in range(2))
    assert same(one, other)
    other.topk_weights.view(np.uint32)[0, 0, 0] ^= 1
    assert not same(one, other)


@pytest.mark.parametrize("experts", [1, 128, 255, 256, 257, 512])
def test_first_last_and_no_expert_survive_at_every_width(experts, tmp_path):
    start = made.start_event(layers=2, experts=experts, top_k=1)
    event = made.step_event(start, 0, 3)
    event.topk_ids[:] = np.array([0, experts - 1, -1])[:, None, None]
    loaded = load(save(record([start, event]), tmp_path / "x.moetrace"))
    assert loaded.columns["rows/topk_ids"][:, 1, 0].tolist() == [0, experts - 1, -1]
    counts = loaded.expert_counts()
    assert counts.shape == (2, experts) and counts.sum() == 4
    assert counts[0, 0] and counts[0, experts - 1]


@pytest.mark.parametrize("experts", [1, 128, 255, 256, 257, 512])
@pytest.mark.parametrize("bad", ["E", -2])
def test_an_expert_that_does_not_exist_is_refused_on_write(experts, bad):
    start = made.start_event(layers=2, experts=experts, top_k=1)
    event = made.step_event(start, 0, 3)
    event.topk_ids[2, 1, 0] = experts if bad == "E" else bad
    with pytest.raises(TraceError, match=f"allowed is -1 to {experts - 1}"):
        record([start, event])


def test_a_decision_for_an_expert_that_does_not_exist_is_refused_on_write():
    start = made.start_event()
    event = made.step_event(start, 0, 3, num_decisions=1)
    wrong = dataclasses.replace(event.decisions[0], runner_up=8)
    with pytest.raises(TraceError, match="runner_up"):
        record([start, dataclasses.replace(event, decisions=(wrong,))])


def test_an_id_too_wide_for_its_column_is_refused_not_wrapped():
    start = made.start_event()
    event = made.step_event(start, 0, 3)
    wide = dataclasses.replace(event, topk_ids=event.topk_ids.astype(np.int64) + 65536)
    with pytest.raises(TraceError, match="allowed"):
        record([start, wide])


def test_a_step_of_another_shape_than_the_model_is_refused():
    event = made.step_event(made.start_event(layers=3), 7, 2)
    with pytest.raises(TraceError, match=r"step 7: topk_ids has shape \(2, 3, 2\)"):
        record([made.start_event(layers=4), event])


def test_a_run_without_steps_is_a_trace(tmp_path):
    loaded = load(save(record([made.start_event()]), tmp_path / "x.moetrace"))
    assert loaded.num_steps == loaded.num_rows == 0
    assert loaded.columns["rows/topk_ids"].shape == (0, 4, 2)
    assert loaded.expert_counts().sum() == 0


def test_a_dense_model_has_traces_too(tmp_path):
    start = dataclasses.replace(
        made.start_event(), moe_layers=(), num_experts=0, top_k=0, rank_of_phy=()
    )
    event = made.step_event(start, 0, 3)
    loaded = load(save(record([start, event]), tmp_path / "x.moetrace"))
    assert loaded.columns["rows/topk_ids"].shape == (3, 0, 0)


def test_equal_traces_are_equal_files(trace, tmp_path):
    one, other = (save(trace, tmp_path / name).read_bytes() for name in ("a", "b"))
    assert one == other


def test_numpy_reads_the_file_without_the_workbench(file, trace):
    with np.load(file, allow_pickle=False) as arrays:
        assert np.array_equal(arrays["rows/topk_ids"], trace.columns["rows/topk_ids"])


def test_rows_know_their_step_and_their_request(trace):
    assert trace.row_steps.tolist() == [s for s in range(6) for _ in range(3)]
    assert trace.rows_of(1).tolist() == [1, 4, 7, 10, 13, 16]


def test_columns_of_a_trace_cannot_be_changed(trace, file):
    for one in (trace, load(file)):
        with pytest.raises(ValueError, match="read-only"):
            one.columns["rows/token_ids"][0] = 1


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
