"""What holds for every view: its columns, whatever the trace; tokens counted once; its label."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest

from engine.errors import ConfigError
from tests.views.handmade import DENSE, EMPTY, ONE_TOKEN, Row, trace
from workbench import views
from workbench.trace import Recorder, synthetic
from workbench.views import (
    balance,
    batch,
    devices,
    domains,
    drafts,
    dropped,
    formats,
    jumps,
    load,
    looked_up,
    overhead,
    ranks,
    stages,
    tokens,
    traffic,
)

View = Callable[..., pd.DataFrame]

VIEWS: dict[str, tuple[View, dict]] = {
    "expert_load": (views.expert_load, load.LOAD_COLUMNS),
    "domain_load": (views.domain_load, domains.DOMAIN_COLUMNS),
    "draft_acceptance": (views.draft_acceptance, drafts.DRAFT_COLUMNS),
    "dropped_slots": (views.dropped_slots, dropped.DROPPED_COLUMNS),
    "device_load": (views.device_load, devices.DEVICE_LOAD_COLUMNS),
    "device_traffic": (views.device_traffic, traffic.TRAFFIC_COLUMNS),
    "token_experts": (views.token_experts, tokens.TOKEN_COLUMNS),
    "unit_formats": (views.unit_formats, formats.FORMAT_COLUMNS),
    "jump_rate": (views.jump_rate, jumps.JUMP_COLUMNS),
    "stage_times": (views.stage_times, stages.STAGE_COLUMNS),
    "stage_totals": (views.stage_totals, stages.STAGE_TOTAL_COLUMNS),
    "overhead_by_step": (views.overhead_by_step, overhead.OVERHEAD_COLUMNS),
    "overhead_total": (views.overhead_total, overhead.OVERHEAD_TOTAL_COLUMNS),
    "overhead_by_batch": (views.overhead_by_batch, batch.BATCH_COLUMNS),
    "rank_times": (views.rank_times, ranks.RANK_COLUMNS),
    "look_ups": (views.look_ups, looked_up.LOOK_UP_COLUMNS),
    "load_balance": (views.load_balance, balance.BALANCE_COLUMNS),
}
COUNT_TOKENS = ("expert_load", "domain_load", "device_load", "token_experts", "jump_rate")


def recorded():
    recorder = Recorder()
    for event in synthetic.run(synthetic.start_event(), steps=6, rows=3, num_ranks=2):
        recorder.emit(event)
    return recorder.trace()


TRACES = {"empty": EMPTY, "dense": DENSE, "one token": ONE_TOKEN, "synthetic": recorded()}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("kind", TRACES)
def test_a_view_has_its_columns_and_dtypes_whatever_the_trace(name, kind):
    view, columns = VIEWS[name]
    frame = view(TRACES[kind])
    assert list(frame.columns) == list(columns)
    for column, (dtype, meaning) in columns.items():
        assert frame[column].dtype == pd.Series([], dtype=dtype).dtype, column
        assert meaning
    assert list(frame.index) == list(range(len(frame)))


@pytest.mark.parametrize("name", VIEWS)
def test_an_empty_trace_has_no_shares_and_a_dense_one_no_experts(name):
    view, _ = VIEWS[name]
    empty, dense = view(EMPTY), view(DENSE)
    numbers = [c for c in ("share", "load", "value", "rate", "lift") if c in empty]
    assert empty[numbers].isna().all(axis=None), "nothing ran, so nothing has a share"
    if "layer" in dense:
        assert dense.empty


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_carries_its_label_and_refuses_another_word(name):
    view, _ = VIEWS[name]
    assert set(view(TRACES["synthetic"])["label"]) == {"recorded"}
    assert set(view(TRACES["synthetic"], label="measured")["label"]) == {"measured"}
    with pytest.raises(ConfigError, match=r"'guessed'.*measured, modelled, recorded"):
        view(EMPTY, label="guessed")


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_gives_the_same_table_twice_and_leaves_the_trace_alone(name):
    view, _ = VIEWS[name]
    before = {key: column.copy() for key, column in TRACES["synthetic"].columns.items()}
    pd.testing.assert_frame_equal(view(TRACES["synthetic"]), view(TRACES["synthetic"]))
    for key, column in TRACES["synthetic"].columns.items():
        assert np.array_equal(before[key], column, equal_nan=column.dtype.kind == "f")


ACCEPTED_ROWS = [Row(0, 0, [(0, 1)]), Row(0, 1, [(2, 1)]), Row(1, 0, [(0, 3)])]
RERUN_ROWS = [
    Row(0, 0, [(3, 2)], step=1, cause="preemption"),
    Row(0, 1, [(3, 2)], step=1, cause="recovery"),
    Row(1, 1, [(3, 2)], step=2, cause="rejected_draft"),
    Row(1, 0, [(2, 3)], step=2, cause="precision"),
]


def counts_each_token_once(view: View) -> None:
    clean, mixed = trace(ACCEPTED_ROWS), trace([*ACCEPTED_ROWS, *RERUN_ROWS])
    pd.testing.assert_frame_equal(view(mixed), view(clean))


@pytest.mark.parametrize("name", COUNT_TOKENS)
def test_rows_run_again_do_not_count_as_tokens(name):
    counts_each_token_once(VIEWS[name][0])


@pytest.mark.parametrize("per", ["expert", "device"])
def test_rows_run_again_do_not_change_the_balance(per):
    counts_each_token_once(lambda t: views.load_balance(t, per=per))


@pytest.mark.parametrize("name", [*COUNT_TOKENS, "load_balance"])
def test_a_view_that_forgets_rows_run_again_is_caught(name):
    with pytest.raises(AssertionError):
        counts_each_token_once(lambda t: VIEWS[name][0](t, causes=None))


@pytest.mark.parametrize("name", [*COUNT_TOKENS, "load_balance", "device_traffic"])
def test_an_unknown_cause_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=r"'accept'.*accepted, preemption"):
        VIEWS[name][0](EMPTY, causes=("accept",))


def test_every_view_of_the_package_is_held_to_these_rules():
    helpers = {"measures", "overhead_marks", "overhead_state", "stage_kind"}
    functions = {name for name in views.__all__ if name.islower()}
    assert functions - helpers == set(VIEWS)
