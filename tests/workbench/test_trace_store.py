"""A `.moetrace` file gives back what was put in; what has no place in it is refused on writing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import TraceError
from engine.events import ControlEvent, TextEvent
from tests.workbench.conftest import record
from workbench.trace import load, replay, save
from workbench.trace import synthetic as made


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
        options = {"num_decisions": 2, "num_ranks": step % 3}
        events.append(made.step_event(start, step, count, seed=seed, **options))
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
