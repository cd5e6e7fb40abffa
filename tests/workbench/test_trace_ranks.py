"""What ranks did in a step survives a file and the telemetry wire; files without it are read."""

from __future__ import annotations

import io
import json
import zipfile

import numpy as np
import pytest

from engine.errors import TraceError
from engine.events import STAGES
from engine.runtime.telemetry import Aggregator
from engine.runtime.telemetry.wire import decode, encode
from tests.workbench.conftest import record
from tests.workbench.test_trace_damage import assert_refused, rewrite
from workbench.trace import load, replay, save
from workbench.trace import synthetic as made
from workbench.trace.schema import COLUMNS, COLUMNS_SINCE, STAGES_OF, VERSION


def of_two_ranks(steps=4):
    start = made.start_event()
    return [start, *(made.step_event(start, step, 3, num_ranks=2) for step in range(steps))]


@pytest.fixture
def ranked(tmp_path):
    return save(record(of_two_ranks()), tmp_path / "ranks.moetrace")


LATER = [STAGES.index(stage) for stage in STAGES if stage not in STAGES_OF[3]]


def as_version_3(members):
    """Turn a file into what was written before there were four levels, or look-ups were told."""
    for name in (*COLUMNS_SINCE, *(name for name in COLUMNS if name.startswith("units/"))):
        del members[f"{name}.npy"]
    for name in ("steps/stage_ms.npy", "ranks/stage_ms.npy"):
        members[name] = without_columns(members[name], LATER)
    old_of_now = [STAGES_OF[3].index(s) if s in STAGES_OF[3] else 0 for s in STAGES]
    stages = np.array(old_of_now, np.uint8)[np.load(io.BytesIO(members["spans/stages.npy"]))]
    out = io.BytesIO()
    np.lib.format.write_array(out, stages)
    members["spans/stages.npy"] = out.getvalue()
    events = json.loads(members["events.json"])
    for text in events["decisions"]:
        for name in ("format_reason", "model", "verdict", "looked_up", "stage_ms"):
            del text[name]
    members["events.json"] = json.dumps(events).encode()
    manifest = json.loads(members["manifest.json"])
    del manifest["counts"]["units"]
    manifest |= {"version": 3, "stages": list(STAGES_OF[3])}
    members["manifest.json"] = json.dumps(manifest).encode()


def as_version_1(members):
    """Turn a file into what the first release wrote."""
    as_version_2(members)
    for name in [name for name in members if name.startswith("ranks/")]:
        del members[name]
    manifest = json.loads(members["manifest.json"])
    del manifest["exchanges"], manifest["counts"]["ranks"]
    manifest |= {"version": 1, "stages": list(STAGES_OF[1])}
    members["manifest.json"] = json.dumps(manifest).encode()


def as_version_2(members):
    """Turn a file into what was written before ranks told when they did what."""
    as_version_3(members)
    for name in [name for name in members if name.startswith(("spans/", "flights/"))]:
        del members[name]
    manifest = json.loads(members["manifest.json"])
    del manifest["counts"]["spans"], manifest["counts"]["flights"]
    members["manifest.json"] = json.dumps(manifest | {"version": 2}).encode()


def without_columns(member, *columns):
    array = np.load(io.BytesIO(member))
    out = io.BytesIO()
    np.lib.format.write_array(out, np.ascontiguousarray(np.delete(array, columns, axis=1)))
    return out.getvalue()


def test_a_replayed_step_has_the_ranks_it_was_recorded_with(ranked, same):
    events = of_two_ranks()
    got = list(replay(load(ranked)))
    assert all(map(same, got, events)) and len(got[1].ranks) == 2
    got[1].ranks[1].busy_ms += 1e-9
    assert not same(got[1], events[1])


def test_a_file_of_the_first_version_is_read_as_a_run_in_one_process(file, trace):

    def change(members):
        as_version_1(members)
        new = [i for i, stage in enumerate(STAGES_OF[2]) if stage not in STAGES_OF[1]]
        members["steps/stage_ms.npy"] = without_columns(members["steps/stage_ms.npy"], new)

    old = load(rewrite(file, change))
    assert old.num_rank_lines == 0 and old.step_event(0).ranks == ()
    before, after = trace.step_event(2).stage_ms, old.step_event(2).stage_ms
    assert after == {stage: before[stage] for stage in STAGES_OF[1]}
    with zipfile.ZipFile(save(old, file)) as archive:
        assert json.loads(archive.read("manifest.json"))["version"] == VERSION


def test_a_file_of_the_second_version_is_read_without_its_tracks(ranked):
    old = load(rewrite(ranked, as_version_2)).step_event(1)
    assert len(old.ranks) == 2 and old.ranks[1].rows.sum() > 0
    assert not len(old.spans.stages) and old.ranks[1].flights.rows.shape == (0, 2)


def test_a_first_version_with_stages_of_the_second_is_refused(file):
    assert_refused(rewrite(file, as_version_1), "stage_ms")


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("rank", 2, "ranks/rank"),
        ("mode", "pigeon", "pigeon"),
        ("busy_ms", -1.0, "ranks/busy_ms"),
        ("rows", np.array([1, 2, 3]), "ranks/rows"),
        ("messages", np.array([-1, 0]), "ranks/messages"),
    ],
)
def test_a_rank_that_cannot_be_is_refused_on_writing(field, value, word):
    events = of_two_ranks(1)
    setattr(events[1].ranks[1], field, value)
    with pytest.raises(TraceError, match=word):
        record(events)


def test_a_frame_shows_the_ranks_of_the_last_step_after_the_wire():
    events = of_two_ranks()
    sums = Aggregator()
    sums.add(events)
    frame = decode(encode(sums.frame(1, events[-1].time_s))[4:])
    last = events[-1].ranks[1]
    shown = frame.meta["ranks"][1]
    assert shown["rows"] == last.rows.sum() and shown["busy_ms"] == last.busy_ms
    assert shown["mode"] == "overlapped" and len(frame.meta["ranks"]) == 2
    sums.add([made.step_event(events[0], 9, 3)])
    assert sums.frame(2, events[-1].time_s).meta["ranks"] == []
