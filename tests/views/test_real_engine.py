"""Views of a real run agree with what the engine itself says, also across a change of table."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from engine import Engine, EngineConfig, SamplingParams
from engine.exchange.dispatch import traffic
from engine.routing.placement import assigned
from tests.runtime.conftest import MODEL
from workbench import views
from workbench.tally import Tally
from workbench.trace import Recorder, Trace, replay


@pytest.fixture(scope="module")
def run() -> tuple[Trace, dict, list]:
    recorder = Recorder()
    config = EngineConfig(model=str(MODEL), num_devices=4)
    with closing(Engine(config, sink=recorder)) as engine:
        tables = {engine.table.version: engine.table}
        done = engine.generate(["Der Server"], SamplingParams(max_tokens=6))
        moved = assigned(
            engine.table.num_layers,
            [3, 3, 2, 2, 1, 1, 0, 0],
            4,
            version=engine.table.version + 1,
        )
        engine.control.publish_table(moved)
        tables[moved.version] = engine.table
        done += engine.generate(["12 + 30 = "], SamplingParams(max_tokens=6))
    return recorder.trace(), tables, done


def test_the_counts_are_those_of_the_tally_and_of_the_completions(run):
    trace, _, done = run
    tally = Tally()
    for event in replay(trace):
        tally.emit(event)
    table = views.expert_load(trace)
    assert table["rows"].tolist() == tally.expert_counts_LE.ravel().tolist()
    rows = sum(completion.rows for completion in done)
    assert set(table.groupby("layer")["rows"].sum()) == {rows * trace.start.top_k}
    assert views.overhead_total(trace)["share"].item() == pytest.approx(tally.overhead_share)


def test_the_traffic_is_that_of_the_table_each_step_read(run):
    trace, tables, _ = run
    devices, layers = trace.start.num_devices, trace.start.moe_layers
    expected = np.zeros((len(layers), devices, devices), np.int64)
    for index in range(trace.num_steps):
        event = trace.step_event(index)
        for layer in range(len(layers)):
            expected[layer] += traffic(
                event.homes.astype(np.int64),
                event.phy_ids[:, layer].astype(np.int64),
                tables[event.table_version],
            )
    assert len(set(trace.columns["steps/table_version"].tolist())) == 2
    table = views.device_traffic(trace)
    assert table["rows"].tolist() == expected.ravel().tolist()


def test_the_stages_leave_next_to_nothing_of_a_step_unaccounted(run):
    table = views.stage_times(run[0])
    other = table[table["stage"] == "other"]
    assert other["share"].abs().median() < 0.01
